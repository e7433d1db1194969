"""The layer as functions: workspaces, schedules, forward and backward.

    workspace = get_workspace(config, member, num_local_tokens=T, hidden_size=H, topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=El)
    output, context = forward(config, workspace, schedule, x, router_weights, *shared_weights, *routed_weights)
    gradients = backward(
        config, workspace, schedule, context, d_output, x, router_weights, *shared_weights, *routed_weights
    )

All tensors are contiguous and on the workspace's device. Every rank of the group makes the same calls in the
same order; each call is collective. They raise TypeError or ValueError that names the argument; MoKPeerError where a
peer failed or makes another call; MoKTimeoutError (MoKDeadlockError on fibers) when a signal never comes: then
outputs and gradients are NaN and the workspace needs reset().
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mok_modular.calls.checks import OWN_NAMES, Names, check_layer, check_ring, check_schedule, config_agreement
from mok_modular.calls.collective import call_key, keep_pushed_x, layer_call, make_collective, remember, with_tensors
from mok_modular.calls.functional_backward import (
    MoKDgradContext,
    backward,
    backward_dgrad,
    backward_wgrad,
    recompute_forward_context,
)
from mok_modular.calls.precision import RoutedWeight, unpack_forward
from mok_modular.calls.values import (
    MoKForwardContext,
    MoKSchedule,
    context_tensors,
    empty_context,
    empty_schedule,
    named_weights,
    schedule_fields,
    schedule_sizes,
)
from mok_modular.calls.workspace import Workspace, clear_workspace_cache, create_workspace, get_workspace
from mok_modular.protocol.call import Call
from mok_modular.protocol.config import MoKConfig

__all__ = [
    "MoKDgradContext",
    "MoKForwardContext",
    "MoKSchedule",
    "backward",
    "backward_dgrad",
    "backward_wgrad",
    "build_schedule",
    "clear_workspace_cache",
    "create_workspace",
    "forward",
    "get_workspace",
    "recompute_forward_context",
]


def build_schedule(
    workspace: Workspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
) -> MoKSchedule:
    """Exchanges the top-k ids of all ranks and builds this rank's table of rows. Collective.

    top_experts: [T, K] int32 or int64, contiguous; -1 = no route, else 0..E-1 with E = num_local_experts * R;
    expert e lives on rank e // num_local_experts. T may differ by rank and may be 0.

    Raises TypeError (dtype) or ValueError (shape, ids out of range with their count, more rows than the configured
    capacity with both numbers) on the rank concerned; its peers raise MoKPeerError.
    """
    return build_named_schedule(workspace, config, top_experts, num_local_experts, OWN_NAMES)


def build_named_schedule(
    workspace: Workspace, config: MoKConfig, top_experts: Tensor, num_local_experts: int, names: Names
) -> MoKSchedule:
    """build_schedule with errors in the words of its caller."""

    def checked() -> tuple[Call, dict[str, int]]:
        """The call, apart from its tensors, and the sizes of the schedule's."""
        ids, num_experts = check_schedule(workspace, config, top_experts, num_local_experts, names)
        capacity_rows = workspace.shared.capacity_rows(num_experts)
        if capacity_rows >= 2**31:
            raise ValueError(
                f"rows must be below 2147483648, got room for {capacity_rows} with padding; set "
                "schedule_capacity_multiplier or make num_local_tokens smaller"
            )
        shape = workspace.shared.shape(num_experts, capacity_rows, 64)
        check_ring(config, shape)
        call = Call(
            kind="schedule",
            plan=config.plan,
            num_tokens=ids.shape[0],
            num_local_experts=num_experts,
            capacity_rows=capacity_rows,
            schedule={},
            tensors={},
            agree={"num_local_experts": num_experts, **config_agreement(workspace, config)},
            config=config,
        )
        return call, schedule_sizes(shape, ids.numel())

    def prepare() -> tuple[Call, MoKSchedule]:
        key = call_key("schedule", workspace, config, (top_experts,), num_local_experts)
        call, sizes = remember(workspace, key, checked)
        ids = top_experts.to(torch.int32)
        schedule = empty_schedule(sizes, ids.device)
        places = key and (key, ids.data_ptr(), *(tensor.data_ptr() for tensor in schedule_fields(schedule)))
        return with_tensors(call, workspace, schedule, {"top_experts": ids}, places), schedule

    schedule: MoKSchedule = make_collective(workspace, "build_schedule", config, prepare)
    return schedule


def forward(
    config: MoKConfig,
    workspace: Workspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: RoutedWeight,
    w_routed_up: RoutedWeight,
    w_routed_down: RoutedWeight,
    swiglu_limit: float | None = None,
    *,
    save_context: bool = True,
) -> tuple[Tensor, MoKForwardContext]:
    """out[t] = shared(x[t]) + sum over k of router_weights[t, k] * expert[t, k](x[t]), rounded to bf16. Collective.

    x [T, H] bf16; router_weights [T, K] float32; w_shared_gate, w_shared_up [S, H], w_shared_down [H, S] bf16 or all
    None; w_routed_gate, w_routed_up [El, I, H], w_routed_down [El, H, I] bf16, the experts of this rank. An expert is
    down(swiglu(gate(x), up(x))); swiglu_limit clamps gate above and up on both sides before it.
    MXFP8: the three routed weights as (data, scale) of ops.mxfp8_quantize, H, I and S multiples of 128. Then x and h
    are quantized too, and the context's x is what is left of it.
    Returns (output [T, H] bf16, context); the context's tensors are empty with save_context=False.
    """

    weights = named_weights(w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down)

    def prepare() -> tuple[Call, Any]:
        unpacked, is_mxfp8 = unpack_forward(weights)

        def checked() -> tuple[Call, MoKForwardContext]:
            """The call, apart from its tensors, and a context that holds nothing."""
            sizes = check_layer(workspace, config, schedule, x, router_weights, unpacked, swiglu_limit, is_mxfp8)
            limit = None if swiglu_limit is None else float(swiglu_limit)
            call = layer_call("forward", workspace, config, schedule, sizes, {}, len(x), limit, is_mxfp8)
            # What is remembered must hold no memory: a schedule that lives on makes the next one lie elsewhere.
            return replace(call, schedule={}), empty_context(x, 0, *sizes[1:])

        # A new schedule's tensors are where the last one's were, as a rule: then nothing is checked or packed again.
        given = (x, router_weights, *unpacked.values(), *schedule_fields(schedule))
        key = call_key("forward", workspace, config, given, swiglu_limit)
        call, context = remember(workspace, key, checked)
        output = torch.empty_like(x)
        tensors = {**unpacked, "x": x, "router_weights": router_weights, "output": output}
        places = key and (key, output.data_ptr())
        if save_context:
            ring_rows = min(config.macrobatch_size, schedule.peer_rank.numel())
            context = empty_context(x, ring_rows, call.intermediate_size, call.shared_size)
            kept = context_tensors(context)
            tensors |= kept
            places = key and (*places, *(tensor.data_ptr() for tensor in kept.values()))
        return with_tensors(call, workspace, schedule, tensors, places), (output, context)

    output, context = make_collective(workspace, "forward", config, prepare)
    keep_pushed_x(config, workspace, schedule, context)
    return output, context
