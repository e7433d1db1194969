"""What the functions of mok_modular.functional share: schedules and contexts, checks of arguments, running a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mok_modular.config import MoKConfig
from mok_modular.errors import MoKPeerError
from mok_modular.targets import host
from mok_modular.workspace import Workspace, layout_key

T = TypeVar("T")

ROUTED_WEIGHTS = ("w_routed_gate", "w_routed_up", "w_routed_down")
SHARED_WEIGHTS = ("w_shared_gate", "w_shared_up", "w_shared_down")


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """Where every row comes from and goes to; int32 tensors. C rows of capacity, El local experts.

    peer_rank, peer_token_idx [C]: source rank and flat route token*K+k of a row; -1 in padding and beyond.
    segment_start [El+1], segment_num_rows [El]: rows of each local expert, with and without padding.
    row_block_expert [C / row_block]: local expert of a row block.
    window_start, generation_window: the order of work: row blocks of each window, windows of each macrobatch.
    counts [5]: rows, windows, routes of this rank, rows wanted, number of the build.
    route_rank, route_row [T*K]: owner and row there of this rank's own routes; -1 for none.
    sorted_route [T*K]: own routes by expert, the order in which a pusher sends them.
    token_row [R*n]: first row here of each peer's token that comes here, n the workspace's num_local_tokens when the
    schedule was built; with dispatch="pull_once", else empty.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    segment_start: Tensor
    segment_num_rows: Tensor
    row_block_expert: Tensor
    window_start: Tensor
    generation_window: Tensor
    counts: Tensor
    route_rank: Tensor
    route_row: Tensor
    sorted_route: Tensor
    token_row: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return dict(vars(self))

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding included. Synchronises on a GPU."""
        return int(self.counts[0])


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """What backward needs of macrobatch 0: x [M, H], gate and up [M, I], M rows of the ring, bf16; and of the shared
    expert: shared_gate and shared_up [T, S]. Absent tensors are empty."""

    x: Tensor
    gate: Tensor
    up: Tensor
    shared_gate: Tensor
    shared_up: Tensor


def make_collective(workspace: Workspace, name: str, config: MoKConfig, prepare: Callable[[], Any]) -> Any:
    """Checks this rank's arguments and makes the call with all ranks: `prepare() -> (host.Call, what to return)`.

    What `prepare` raises is raised here, and the peers get a MoKPeerError that names it.
    """
    try:
        call, results = prepare()
    except (TypeError, ValueError) as error:
        tell_peers(workspace, name, error)
        raise

    def act(calls: list[host.Call | None]) -> Sequence[Any]:
        return run(workspace, calls, name)

    workspace.meet(name, call, act, config.start_timeout_s, is_checked_later=True)
    return results


MAX_REMEMBERED = 256
"""Checked calls of a workspace that are kept, before all are forgotten."""


def call_key(kind: str, workspace: Workspace, config: MoKConfig, tensors: Sequence[Any], *values: Any) -> Any:
    """Everything that a call's checks look at and its kernels are told, but for what the call allocates itself.

    Where it is the same as before, nothing is checked or packed again. None where nothing is remembered (on a CPU
    checks look at values), and where an argument is no tensor, which the checks then say.
    """
    layout = getattr(workspace.shared, "layout", None) if isinstance(workspace, Workspace) else None
    if layout is None or not isinstance(config, MoKConfig):
        return None
    try:
        places = tuple(
            None if t is None else (t.data_ptr(), t.shape, t.dtype, t.is_cuda, t.is_contiguous()) for t in tensors
        )
        key = (kind, id(config), layout, workspace.num_local_tokens, tuple((type(v), v) for v in values), places)
        hash(key)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return key


def remember(workspace: Workspace, key: Any, checked: Callable[[], T]) -> T:
    """`checked()`, or what it returned for the same key."""
    if key is None:
        return checked()
    found = workspace.remembered.get(key)
    if found is None:
        if len(workspace.remembered) >= MAX_REMEMBERED:
            workspace.remembered.clear()
        found = workspace.remembered[key] = checked()  # holds the config whose identity is in the key
    return cast(T, found)


def with_tensors(
    call: host.Call, workspace: Workspace, schedule: MoKSchedule, tensors: Mapping[str, Tensor | None], key: Any
) -> host.Call:
    """A call with its tensors, on the current stream. `key`: of all that its kernels are told, None if not known."""
    return replace(
        call,
        schedule=schedule.tensors(),
        tensors={name: tensor for name, tensor in tensors.items() if tensor is not None},
        stream=current_stream(workspace),
        key=key,
    )


def schedule_fields(schedule: Any) -> tuple[Any, ...]:
    """The tensors of a schedule; an object that is none makes `call_key` return None."""
    return tuple(vars(schedule).values()) if isinstance(schedule, MoKSchedule) else (schedule,)


def layer_call(
    kind: str,
    workspace: Workspace,
    config: MoKConfig,
    schedule: MoKSchedule,
    sizes: tuple[int, int, int],
    tensors: Mapping[str, Tensor | None],
    num_tokens: int,
    swiglu_limit: float | None,
    is_mxfp8: bool = False,
) -> host.Call:
    """A call of the layer with arguments that were checked; `sizes` as check_layer returns them."""
    num_local_experts, intermediate_size, shared_size = sizes
    return host.Call(
        kind=kind,
        plan=config.plan,
        num_tokens=num_tokens,
        num_local_experts=num_local_experts,
        capacity_rows=schedule.peer_rank.numel(),
        schedule=schedule.tensors(),
        tensors={name: tensor for name, tensor in tensors.items() if tensor is not None},
        agree={
            "hidden_size": workspace.hidden_size,
            "topk": workspace.topk,
            "num_local_experts": num_local_experts,
            "intermediate_size": intermediate_size,
            "shared_size": shared_size,
            "swiglu_limit": swiglu_limit,
            "mode": str(config.plan),
            # Without a look at the device, so not on a GPU.
            "schedule": None if schedule.counts.is_cuda else int(schedule.counts[4]),
            "precision": "mxfp8" if is_mxfp8 else "bf16",
            **config_agreement(workspace, config),
        },
        intermediate_size=intermediate_size,
        shared_size=shared_size,
        swiglu_limit=swiglu_limit,
        is_mxfp8=is_mxfp8,
        config=config,
        stream=current_stream(workspace),
    )


def named_weights(*weights: Any) -> dict[str, Any]:
    """The six weights by name, given in the order of `forward`: the shared expert's gate, up and down, then routed."""
    return dict(zip((*SHARED_WEIGHTS, *ROUTED_WEIGHTS), weights, strict=True))


def context_tensors(context: MoKForwardContext) -> dict[str, Tensor]:
    """The fields of a context by the names of csrc/layout.h."""
    return {f"context_{name}": tensor for name, tensor in vars(context).items()}


def keep_pushed_x(config: MoKConfig, workspace: Workspace, schedule: MoKSchedule, context: MoKForwardContext) -> None:
    """A pusher can only write symmetric memory, so what is kept of x is copied from there, behind the call."""
    if config.dispatch != "push" or context.x.numel() == 0:
        return
    ring = workspace.shared.region(workspace.member.rank(), "ring_x", torch.bfloat16)
    context.x.copy_(ring[: context.x.numel()].view_as(context.x))
    # Nor does a pusher write padding: those rows of the ring hold whatever an earlier call left there.
    context.x.masked_fill_((schedule.peer_rank[: len(context.x)] < 0).unsqueeze(1), 0)


def tell_peers(workspace: Workspace, name: str, error: Exception) -> None:
    """This rank's part of a call whose arguments were wrong: its peers raise a MoKPeerError, the next call works."""
    if isinstance(workspace, Workspace):
        workspace.meet(name, error, lambda payloads: payloads, is_checked_later=True)


def current_stream(workspace: Workspace) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(workspace.device) if workspace.device.type == "cuda" else None


def run(workspace: Workspace, calls: Sequence[Any], name: str) -> list[Any]:
    """Runs the call of every rank; a rank whose schedule overflowed raises that, its peers a MoKPeerError."""
    errors = list(workspace.shared.run(calls))
    overflows: dict[int, str] = {}
    for rank, call in enumerate(calls):
        if call.kind != "schedule" or errors[rank] is not None or call.schedule["counts"].is_cuda:
            continue
        want = int(call.schedule["counts"][3])
        if want > call.capacity_rows:
            overflows[rank] = (
                f"{name}: {want} rows come to rank {rank}, but schedule_capacity_multiplier="
                f"{call.config.schedule_capacity_multiplier} leaves room for {call.capacity_rows}"
            )
    for rank in range(len(calls) if overflows else 0):
        first, text = next(iter(overflows.items()))
        peer_error = MoKPeerError(f"rank {first} raised ValueError: {text}", first)
        errors[rank] = ValueError(overflows[rank]) if rank in overflows else errors[rank] or peer_error
    return errors


def schedule_sizes(shape: Any, num_routes: int) -> dict[str, int]:
    return {
        "peer_rank": shape.capacity_rows,
        "peer_token_idx": shape.capacity_rows,
        "segment_start": shape.num_local_experts + 1,
        "segment_num_rows": shape.num_local_experts,
        "row_block_expert": shape.capacity_rows // shape.row_block,
        "window_start": shape.max_windows + 1,
        "generation_window": shape.max_generations + 1,
        "counts": host.extension().num_counts(),
        "route_rank": num_routes,
        "route_row": num_routes,
        "sorted_route": num_routes,
        "token_row": shape.num_ranks * shape.max_tokens if shape.is_pull_once else 0,
    }


def empty_schedule(sizes: Mapping[str, int], device: torch.device) -> MoKSchedule:
    """A schedule of these sizes. Its tensors share no memory: what an operator returns must not."""
    return MoKSchedule(**{name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()})


def empty_context(x: Tensor, num_rows: int, intermediate_size: int, shared_size: int) -> MoKForwardContext:
    hidden_size, num_tokens = x.shape[1], x.shape[0] if num_rows else 0
    return MoKForwardContext(
        x=x.new_empty(num_rows, hidden_size),
        gate=x.new_empty(num_rows, intermediate_size),
        up=x.new_empty(num_rows, intermediate_size),
        shared_gate=x.new_empty(num_tokens, shared_size),
        shared_up=x.new_empty(num_tokens, shared_size),
    )


# ---- checks: before anything is launched, with the argument's name, what was given and the rule ----


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
    workspace: Workspace, config: MoKConfig, top_experts: Tensor, num_local_experts: int
) -> tuple[Tensor, int]:
    check_config(workspace, config)
    if isinstance(num_local_experts, bool) or not isinstance(num_local_experts, int):
        raise TypeError(f"num_local_experts must be an int, got {type(num_local_experts).__name__}")
    if num_local_experts < 1:
        raise ValueError(f"num_local_experts must be at least 1, got {num_local_experts}")
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"top_experts must be a tensor, got {type(top_experts).__name__}")
    if top_experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_experts must be torch.int32 or torch.int64, got {top_experts.dtype}")
    check_layout("top_experts", top_experts, workspace)
    if top_experts.dim() != 2 or top_experts.shape[1] != workspace.topk:
        raise ValueError(
            f"top_experts must be [T, K] with the workspace's K = {workspace.topk}, got {list(top_experts.shape)}"
        )
    check_num_tokens(workspace, "top_experts", top_experts)
    num_experts = num_local_experts * workspace.member.size()
    if top_experts.is_cuda:  # no look at the values here: the kernel counts, and the next call raises
        return top_experts.to(torch.int32), num_local_experts
    num_wrong = int(((top_experts < -1) | (top_experts >= num_experts)).sum())
    if num_wrong:
        raise ValueError(
            f"top_experts holds {num_wrong} ids out of range: ids are -1 (no route) or 0..{num_experts - 1} "
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
    check_num_tokens(workspace, "x", x)
    own = workspace.x
    if own.data_ptr() < x.data_ptr() < own.data_ptr() + own.nbytes:
        raise ValueError(
            "x must start where workspace.x starts, or lie outside of it: rows would be overwritten while they are read"
        )
    if x.shape[0] * workspace.topk != schedule.route_rank.numel():
        raise ValueError(
            f"x has {x.shape[0]} tokens, but schedule was built for {schedule.route_rank.numel() // workspace.topk}"
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
    if swiglu_limit is not None:
        if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, int | float):
            raise TypeError(f"swiglu_limit must be a float or None, got {type(swiglu_limit).__name__}")
        if not swiglu_limit >= 0:
            raise ValueError(f"swiglu_limit must be at least 0, got {swiglu_limit}")
    return num_local_experts, inter, shared_size


def check_tensor(name: str, tensor: Any, dtype: torch.dtype, workspace: Workspace) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_layout(name, tensor, workspace)


def check_layout(name: str, tensor: Tensor, workspace: Workspace) -> None:
    if tensor.device.type != workspace.device.type:
        raise ValueError(f"{name} must be on the workspace's device, {workspace.device}, got {tensor.device}")
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


def check_num_tokens(workspace: Workspace, name: str, tensor: Tensor) -> None:
    if tensor.shape[0] > workspace.num_local_tokens:
        raise ValueError(
            f"{name} has {tensor.shape[0]} tokens, the workspace has room for num_local_tokens = "
            f"{workspace.num_local_tokens}; call workspace.grow() on every rank"
        )
