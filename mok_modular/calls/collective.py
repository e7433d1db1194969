"""Making a collective call: what is remembered of its checks, its Call, and the run of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mok_modular.calls.checks import config_agreement
from mok_modular.calls.values import MoKForwardContext, MoKSchedule
from mok_modular.calls.workspace import Workspace, find_workspace
from mok_modular.protocol.call import Call
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.errors import MoKPeerError
from mok_modular.ranks.member import Member

T = TypeVar("T")


def make_collective(workspace: Workspace, name: str, config: MoKConfig, prepare: Callable[[], Any]) -> Any:
    """Checks this rank's arguments and makes the call with all ranks: `prepare() -> (Call, what to return)`.

    What `prepare` raises is raised here, and the peers get a MoKPeerError that names it.
    """
    try:
        call, results = prepare()
    except Exception as error:
        told = explain_memory(workspace, name, error)
        tell_peers(workspace, name, told)
        if told is error:
            raise
        raise told from error

    def act(calls: list[Call | None]) -> Sequence[Any]:
        return run(workspace, calls, name)

    workspace.meet(name, call, act, config.start_timeout_s, is_checked_later=True)
    return results


def explain_memory(workspace: Workspace, name: str, error: Exception) -> Exception:
    """The error itself; where a tensor of a call could not be allocated, one that says what asks for it."""
    is_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if not (is_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)):
        return error
    kind = MemoryError if is_cpu else type(error)
    reason = str(error).partition("\n")[0].rpartition("Allocator: ")[2]
    return kind(
        f"{name}: out of memory for the tensors of a call ({reason}); they grow with num_local_tokens="
        f"{workspace.num_local_tokens} and macrobatch_size={workspace.config.macrobatch_size}: mok-modular doctor "
        "--shape H,I,E,K,S --ranks R --tokens T prints what a layer needs"
    )


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
            None if t is None else (t.data_ptr(), t.shape, t.dtype, t.get_device(), t.is_contiguous()) for t in tensors
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
    call: Call, workspace: Workspace, schedule: MoKSchedule, tensors: Mapping[str, Tensor | None], key: Any
) -> Call:
    """A call with its tensors, on the current stream. `key`: of all that its kernels are told, None if not known."""
    return replace(
        call,
        schedule=schedule.tensors(),
        tensors={name: tensor for name, tensor in tensors.items() if tensor is not None},
        stream=current_stream(workspace),
        key=key,
    )


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
) -> Call:
    """A call of the layer with arguments that were checked; `sizes` as check_layer returns them."""
    num_local_experts, intermediate_size, shared_size = sizes
    return Call(
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


def tell_peers_of_layer(
    config: MoKConfig, member: Member, num_local_tokens: int | None, hidden_size: int, topk: int, error: Exception
) -> None:
    """As tell_peers, for a layer, which may not have a workspace yet; num_local_tokens: None until it is agreed on."""
    workspace = None
    if num_local_tokens is not None:
        workspace = find_workspace(
            config, member, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk
        )
    if workspace is not None:
        tell_peers(workspace, "MoE.forward", error)
    else:  # the peers meet to agree on it, or to create it
        member.group.meet(member.rank(), "MoE.forward", error, lambda payloads: payloads, config.start_timeout_s)


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
