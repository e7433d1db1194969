"""Checks of a call's arguments: before anything is launched, with the argument's name, what was given and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular.calls.values import ROUTED_WEIGHTS, SHARED_WEIGHTS, MoKSchedule, schedule_sizes
from mok_modular.calls.workspace import Workspace, layout_key
from mok_modular.protocol.checks import check_device
from mok_modular.protocol.config import MoKConfig


@dataclass(frozen=True)
class Names:
    """What the caller of build_schedule calls what its errors name."""

    ids: str
    workspace: str


OWN_NAMES = Names("top_experts", "workspace")
LAYER_NAMES = Names("expert_ids", "layer.workspace")


def config_agreement(workspace: Workspace, config: MoKConfig) -> dict[str, Any]:
    return {"config": layout_key(config), "num_local_tokens": workspace.num_local_tokens}


def check_config(workspace: Workspace, config: MoKConfig) -> None:
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace must be a Workspace, got {type(workspace).__name__}")
    if not isinstance(config, MoKConfig):
        raise TypeError(f"config must be a MoKConfig, got {type(config).__name__}")
    if config.stages and workspace.device.type != "cpu":
        raise ValueError(
            f"stages={{...}} needs the host target (ranks on the CPU), the workspace is on {workspace.device}"
        )
    if layout_key(config) != layout_key(workspace.config):
        raise ValueError(
            f"config must agree with the workspace's in everything but mode and timeouts; got {config}, "
            f"the workspace has {workspace.config}"
        )


def check_schedule(
    workspace: Workspace, config: MoKConfig, top_experts: Tensor, num_local_experts: int, names: Names
) -> tuple[Tensor, int]:
    check_config(workspace, config)
    ids = names.ids
    if isinstance(num_local_experts, bool) or not isinstance(num_local_experts, int):
        raise TypeError(f"num_local_experts must be an int, got {type(num_local_experts).__name__}")
    if num_local_experts < 1:
        raise ValueError(f"num_local_experts must be at least 1, got {num_local_experts}")
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"{ids} must be a tensor, got {type(top_experts).__name__}")
    if top_experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{ids} must be torch.int32 or torch.int64, got {top_experts.dtype}")
    check_layout(ids, top_experts, workspace)
    if top_experts.dim() != 2 or top_experts.shape[1] != workspace.topk:
        raise ValueError(
            f"{ids} must be [T, K] with the workspace's K = {workspace.topk}, got {list(top_experts.shape)}"
        )
    check_num_tokens(workspace, ids, top_experts, names)
    num_experts = num_local_experts * workspace.member.size()
    if top_experts.is_cuda:  # no look at the values here: the kernel counts, and the next call raises
        return top_experts.to(torch.int32), num_local_experts
    num_wrong = int(((top_experts < -1) | (top_experts >= num_experts)).sum())
    if num_wrong:
        raise ValueError(
            f"{ids} holds {num_wrong} ids out of range: ids are -1 (no route) or 0..{num_experts - 1} "
            f"({num_local_experts} local experts on {workspace.member.size()} ranks)"
        )
    return top_experts.to(torch.int32), num_local_experts


def check_schedule_tensors(workspace: Workspace, schedule: MoKSchedule) -> None:
    """A schedule may come from another workspace, or have been taken apart and put together again."""
    for name, tensor in schedule.tensors().items():
        check_tensor(f"schedule.{name}", tensor, torch.int32, workspace)
    capacity_rows, row_block = schedule.peer_rank.numel(), workspace.shared.row_block
    if capacity_rows == 0 or capacity_rows % row_block:
        raise ValueError(f"schedule.peer_rank must hold row blocks of {row_block} rows, got [{capacity_rows}]")
    shape = workspace.shared.shape(schedule.segment_num_rows.numel(), capacity_rows, 64)
    sizes = schedule_sizes(shape, schedule.route_rank.numel())
    if shape.is_pull_once:  # has the stride of the workspace's size at the time, and the workspace may have grown
        num_ranks, last_token = workspace.member.size(), schedule.route_rank.numel() // workspace.topk - 1
        if not schedule.peer_token_idx.is_cuda:
            last_token = max(last_token, int(schedule.peer_token_idx.max()) // workspace.topk)
        sizes["token_row"] = num_ranks * max(last_token + 1, schedule.token_row.numel() // num_ranks)
    for name, size in sizes.items():
        tensor = getattr(schedule, name)
        if tensor.dim() != 1 or tensor.numel() != size:
            raise ValueError(
                f"schedule.{name} must be [{size}] on this workspace, got {list(tensor.shape)}: the schedule was "
                "built for another row block, ring, dispatch or number of ranks, or taken apart"
            )
    if not schedule.peer_rank.is_cuda:
        last_rank = max(int(t.max()) for t in (schedule.peer_rank, schedule.route_rank) if t.numel())
        if last_rank >= workspace.member.size():
            raise ValueError(f"schedule names rank {last_rank}, the group has {workspace.member.size()} ranks")


def check_ring(config: MoKConfig, shape: Any) -> None:
    if (config.dispatch != "pull" or config.combine == "pull") and shape.ring_rows < shape.capacity_rows:
        which = f"dispatch={config.dispatch!r}" if config.dispatch != "pull" else "combine='pull'"
        raise ValueError(
            f"{which} needs a ring that holds all rows: macrobatch_size is {config.macrobatch_size}, "
            f"{shape.capacity_rows} rows may come"
        )


def check_layer(
    workspace: Workspace,
    config: MoKConfig,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor | None,
    weights: Mapping[str, Tensor | None],
    swiglu_limit: float | None,
    is_mxfp8: bool = False,
) -> tuple[int, int, int]:
    """Returns (local experts, I, S). A recomputation has no router weights and no down projections. MXFP8 weights come
    dequantized."""
    check_config(workspace, config)
    if not isinstance(schedule, MoKSchedule):
        raise TypeError(f"schedule must be a MoKSchedule, got {type(schedule).__name__}")
    check_schedule_tensors(workspace, schedule)
    check_tensor("x", x, torch.bfloat16, workspace)
    if x.dim() != 2 or x.shape[1] != workspace.hidden_size:
        raise ValueError(f"x must be [T, H] with the workspace's H = {workspace.hidden_size}, got {list(x.shape)}")
    if x.shape[0] * workspace.topk != schedule.route_rank.numel():
        raise ValueError(
            f"x has {x.shape[0]} tokens, but schedule was built for {schedule.route_rank.numel() // workspace.topk}"
        )
    check_num_tokens(workspace, "x", x)
    own = workspace.x
    if own.data_ptr() < x.data_ptr() < own.data_ptr() + own.nbytes:
        raise ValueError(
            "x must start where workspace.x starts, or lie outside of it: rows would be overwritten while they are read"
        )
    if router_weights is not None:
        check_tensor("router_weights", router_weights, torch.float32, workspace)
        check_shape("router_weights", router_weights, (x.shape[0], workspace.topk), "[T, K]")
    shapes = {
        "w_routed_gate": "[El, I, H]",
        "w_routed_up": "[El, I, H]",
        "w_routed_down": "[El, H, I]",
        "w_shared_gate": "[S, H]",
        "w_shared_up": "[S, H]",
        "w_shared_down": "[H, S]",
    }
    routed_names = [name for name in ROUTED_WEIGHTS if name in weights]
    for name in routed_names:
        check_tensor(name, weights[name], torch.bfloat16, workspace)
    gate = weights["w_routed_gate"]
    assert gate is not None
    if gate.dim() != 3:
        raise ValueError(f"w_routed_gate must be [El, I, H], got {list(gate.shape)}")
    hidden, (num_local_experts, inter, _) = workspace.hidden_size, gate.shape
    if num_local_experts != schedule.segment_num_rows.numel():
        raise ValueError(
            f"w_routed_gate has {num_local_experts} experts, schedule was built for {schedule.segment_num_rows.numel()}"
        )
    check_width("intermediate_size", inter)
    for name in routed_names:
        matrix = (hidden, inter) if name == "w_routed_down" else (inter, hidden)
        check_shape(name, weights[name], (num_local_experts, *matrix), shapes[name])
    shared_names = [name for name in SHARED_WEIGHTS if name in weights]
    shared = [name for name in shared_names if weights[name] is not None]
    shared_size = 0
    if shared:
        if shared != shared_names:
            raise ValueError(f"the shared expert's weights must be all given or all None, got only {', '.join(shared)}")
        for name in shared_names:
            check_tensor(name, weights[name], torch.bfloat16, workspace)
        shared_gate = weights["w_shared_gate"]
        assert shared_gate is not None
        shared_size = shared_gate.shape[0]
        check_width("shared_intermediate_size", shared_size)
        for name in shared_names:
            matrix = (hidden, shared_size) if name == "w_shared_down" else (shared_size, hidden)
            check_shape(name, weights[name], matrix, shapes[name])
    if is_mxfp8:
        if config.dispatch == "pull_once":
            raise ValueError("config.dispatch='pull_once' is for BF16 layers, got MXFP8 weights")
        sizes = {"hidden_size": hidden, "intermediate_size": inter, "shared_intermediate_size": shared_size}
        check_mxfp8_sizes(sizes, workspace.device)
    elif config.wire != "bf16":
        raise ValueError(f"config.wire={config.wire!r} needs MXFP8 weights, got BF16 ones")
    check_swiglu_limit(swiglu_limit)
    return num_local_experts, inter, shared_size


def check_inputs(device: torch.device, inputs: Mapping[str, Any], weights: Mapping[str, Tensor | None]) -> None:
    """What a layer checks before torch sees its operators: with one tensor on the meta device torch would run their
    fake implementations, whose results nobody writes."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor of two dimensions, got {type(tensor).__name__}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must be a tensor of two dimensions, got {list(tensor.shape)}")
    for name, tensor in (*inputs.items(), *weights.items()):
        if tensor is not None:
            check_device(name, tensor, device, "group's")


def check_swiglu_limit(swiglu_limit: Any) -> None:
    if swiglu_limit is None:
        return
    if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, int | float):
        raise TypeError(f"swiglu_limit must be a float or None, got {type(swiglu_limit).__name__}")
    if not swiglu_limit >= 0:
        raise ValueError(f"swiglu_limit must be at least 0, got {swiglu_limit}")


def check_tensor(name: str, tensor: Any, dtype: torch.dtype, workspace: Workspace) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_layout(name, tensor, workspace)


def check_layout(name: str, tensor: Tensor, workspace: Workspace) -> None:
    check_device(name, tensor, workspace.device, "workspace's")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for shape {list(tensor.shape)}")


def check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...], words: str) -> None:
    if tensor is None or tuple(tensor.shape) != shape:
        given = None if tensor is None else list(tensor.shape)
        raise ValueError(f"{name} must be {words} = {list(shape)}, got {given}")


def check_width(name: str, value: int) -> None:
    if value < 64 or value % 64:
        raise ValueError(f"{name} must be a positive multiple of 64, got {value}")


def check_mxfp8_sizes(sizes: Mapping[str, Any], device: torch.device | str) -> None:
    """`sizes` by the names of MoEShape, or a MoEShape's own."""
    if torch.device(device).type != "cpu":
        raise ValueError(f"MXFP8 runs on CPU ranks only in this version, the group is on {device}")
    for name in ("hidden_size", "intermediate_size", "shared_intermediate_size"):
        if sizes[name] % 128:
            raise ValueError(f"{name} must be a multiple of 128 in MXFP8, got {sizes[name]}")


def check_num_tokens(workspace: Workspace, name: str, tensor: Tensor, names: Names = OWN_NAMES) -> None:
    num_tokens = tensor.shape[0]
    if num_tokens > workspace.num_local_tokens:
        largest = ", with the largest number of any rank" if workspace.member.size() > 1 else ""
        raise ValueError(
            f"{name} has {num_tokens} tokens, the workspace has room for num_local_tokens = "
            f"{workspace.num_local_tokens}; call {names.workspace}.grow({num_tokens}) on every rank{largest}"
        )
