"""The backward pass as functions: whole, in two halves, and the context computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mok_modular.calls.checks import check_config, check_layer, check_shape, check_tensor
from mok_modular.calls.collective import keep_pushed_x, layer_call, make_collective
from mok_modular.calls.precision import RoutedWeight, unpack_backward, unpack_forward
from mok_modular.calls.values import MoKForwardContext, MoKSchedule, context_tensors, empty_context, named_weights
from mok_modular.calls.workspace import Workspace
from mok_modular.protocol.call import Call
from mok_modular.protocol.config import MoKConfig

MAIN_GRADS = ("d_shared_gate", "d_routed_gate", "d_shared_up", "d_routed_up", "d_shared_down", "d_routed_down")
"""The order of `main_grads`."""


@dataclass(frozen=True, eq=False)
class MoKDgradContext:
    """What `backward_dgrad` leaves for `backward_wgrad`, bf16; M rows of the ring. Absent tensors are empty.

    d_y [M, H]: gradients of the experts' outputs; hidden [M, I]: router weight times h; d_gate, d_up [M, I]; and of the
    shared expert shared_hidden, shared_d_gate, shared_d_up [T, S].
    """

    d_y: Tensor
    hidden: Tensor
    d_gate: Tensor
    d_up: Tensor
    shared_hidden: Tensor
    shared_d_gate: Tensor
    shared_d_up: Tensor

    def named_tensors(self) -> dict[str, Tensor]:
        """The fields by the names of csrc/call.h."""
        return {f"saved_{item.name}": getattr(self, item.name) for item in fields(self)}


def recompute_forward_context(
    config: MoKConfig,
    workspace: Workspace,
    schedule: MoKSchedule,
    x: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_routed_gate: RoutedWeight,
    w_routed_up: RoutedWeight,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """The context that `forward` returned for these arguments, to the last bit, without the rest. Collective.

    Arguments as for `forward`. swiglu_limit changes nothing in a context; it is taken so that calls look alike.
    """

    def prepare() -> tuple[Call, MoKForwardContext]:
        weights: dict[str, Any] = {
            "w_shared_gate": w_shared_gate,
            "w_shared_up": w_shared_up,
            "w_routed_gate": w_routed_gate,
            "w_routed_up": w_routed_up,
        }
        weights, is_mxfp8 = unpack_forward(weights)
        sizes = check_layer(workspace, config, schedule, x, None, weights, swiglu_limit, is_mxfp8)
        context = empty_context(x, min(config.macrobatch_size, schedule.peer_rank.numel()), *sizes[1:])
        tensors = weights | context_tensors(context) | {"x": x}
        limit = _limit(swiglu_limit)
        call = layer_call(
            "recompute_forward_context", workspace, config, schedule, sizes, tensors, len(x), limit, is_mxfp8
        )
        return call, context

    context: MoKForwardContext = make_collective(workspace, "recompute_forward_context", config, prepare)
    keep_pushed_x(config, workspace, schedule, context)
    return context


def backward(
    config: MoKConfig,
    workspace: Workspace,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    d_output: Tensor,
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
    main_grads: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of everything that `forward` took. Collective.

    context: of `forward` or `recompute_forward_context` with the same schedule; it is read only, so it may be used
    again. d_output [T, H] bf16, the gradient of the output; the rest as for `forward`.
    Returns (d_x [T, H] bf16, d_router_weights [T, K] f32, d_routed_gate, d_routed_up [El, I, H], d_routed_down
    [El, H, I], d_shared_gate, d_shared_up [S, H], d_shared_down [H, S]). Weight gradients are bf16 of FP32 sums over
    rows in ascending order; those of experts without rows are zero, the shared ones are of this rank's own tokens
    (None without a shared expert). d_router_weights is the sum over I of bf16(d_h) * h, before the weight, so it is
    right for weights of zero.

    MXFP8: w_routed_gate and w_routed_up as (data, scale, data_t, scale_t), w_routed_down as (data_t, scale_t) of
    ops.mxfp8_quantize; every gradient of an activation is quantized where a product reads it, by row for d_x and along
    the rows for weight gradients.

    main_grads: six tensors, all bf16 or all float32, in the order shared gate, routed gate, shared up, routed up,
    shared down, routed down (shared ones None without a shared expert): the FP32 sums are added to them in one
    addition, those of experts without rows stay untouched, and None is returned for the weights.
    """

    def prepare() -> tuple[Call, tuple[Tensor | None, ...]]:
        weights = named_weights(w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down)
        weights, is_mxfp8 = unpack_backward(weights, can_replay=_can_replay(config, schedule))
        sizes = check_layer(workspace, config, schedule, x, router_weights, weights, swiglu_limit, is_mxfp8)
        _check_backward(workspace, config, schedule, context, d_output, x, sizes)
        gradients = _gradient_tensors(workspace, weights, main_grads)
        outputs = _dgrad_outputs(x, router_weights)
        tensors = weights | context_tensors(context) | outputs | gradients
        tensors |= {"x": x, "router_weights": router_weights, "d_output": d_output}
        limit = _limit(swiglu_limit)
        call = layer_call("backward", workspace, config, schedule, sizes, tensors, len(x), limit, is_mxfp8)
        return call, (*_dgrad_results(outputs), *_weight_results(gradients, main_grads))

    results: tuple[Tensor | None, ...] = make_collective(workspace, "backward", config, prepare)
    return results


def backward_dgrad(
    config: MoKConfig,
    workspace: Workspace,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: RoutedWeight,
    w_routed_up: RoutedWeight,
    w_routed_down: RoutedWeight,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, Tensor, MoKDgradContext]:
    """The half of `backward` that others wait for: (d_x, d_router_weights, what backward_wgrad needs). Collective.

    For schedules that delay weight gradients. Arguments as for `backward`. Raises ValueError unless the ring holds all
    rows (macrobatch_size at least the capacity of the schedule): nothing may be overwritten in between.
    """

    def prepare() -> tuple[Call, tuple[Tensor, Tensor, MoKDgradContext]]:
        weights = named_weights(w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down)
        weights, is_mxfp8 = unpack_backward(weights, can_replay=False)
        sizes = check_layer(workspace, config, schedule, x, router_weights, weights, swiglu_limit, is_mxfp8)
        _check_backward(workspace, config, schedule, context, d_output, x, sizes)
        _check_ring_holds_all(config, schedule)
        outputs = _dgrad_outputs(x, router_weights)
        saved = _empty_dgrad_context(x, schedule.peer_rank.numel(), *sizes[1:])
        tensors = weights | context_tensors(context) | outputs | saved.named_tensors()
        tensors |= {"x": x, "router_weights": router_weights, "d_output": d_output}
        limit = _limit(swiglu_limit)
        call = layer_call("backward_dgrad", workspace, config, schedule, sizes, tensors, len(x), limit, is_mxfp8)
        return call, (outputs["output"], outputs["d_router"], saved)

    results: tuple[Tensor, Tensor, MoKDgradContext] = make_collective(workspace, "backward_dgrad", config, prepare)
    return results


def backward_wgrad(
    config: MoKConfig,
    workspace: Workspace,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    dgrad_context: MoKDgradContext,
    d_output: Tensor,
    x: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: RoutedWeight,
    w_routed_up: RoutedWeight,
    w_routed_down: RoutedWeight,
    *,
    main_grads: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor | None, ...]:
    """The other half: the six weight gradients as `backward` returns them, to the last bit. Collective.

    dgrad_context: of `backward_dgrad` with the same schedule, context, d_output and x; the rest as for `backward`.
    """

    def prepare() -> tuple[Call, tuple[Tensor | None, ...]]:
        weights = named_weights(w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down)
        weights, is_mxfp8 = unpack_backward(weights, needs_values=False)
        sizes = check_layer(workspace, config, schedule, x, None, weights, None, is_mxfp8)
        _check_backward(workspace, config, schedule, context, d_output, x, sizes)
        _check_ring_holds_all(config, schedule)
        want = _empty_dgrad_context(x.to("meta"), schedule.peer_rank.numel(), *sizes[1:])  # shapes
        _check_dgrad_context(workspace, dgrad_context, want)
        gradients = _gradient_tensors(workspace, weights, main_grads)
        tensors = weights | context_tensors(context) | dgrad_context.named_tensors() | gradients
        tensors |= {"x": x, "d_output": d_output}
        call = layer_call("backward_wgrad", workspace, config, schedule, sizes, tensors, len(x), None, is_mxfp8)
        return call, _weight_results(gradients, main_grads)

    results: tuple[Tensor | None, ...] = make_collective(workspace, "backward_wgrad", config, prepare)
    return results


def _can_replay(config: MoKConfig, schedule: MoKSchedule) -> bool:
    """Of arguments that are not checked yet."""
    is_known = isinstance(config, MoKConfig) and isinstance(schedule, MoKSchedule)
    return not is_known or config.macrobatch_size < schedule.peer_rank.numel()


def _limit(swiglu_limit: float | None) -> float | None:
    return None if swiglu_limit is None else float(swiglu_limit)


def _dgrad_outputs(x: Tensor, router_weights: Tensor) -> dict[str, Tensor]:
    return {"output": torch.empty_like(x), "d_router": torch.empty_like(router_weights)}


def _dgrad_results(outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs["output"], outputs["d_router"]


def _empty_dgrad_context(x: Tensor, num_rows: int, intermediate_size: int, shared_size: int) -> MoKDgradContext:
    return MoKDgradContext(
        d_y=x.new_empty(num_rows, x.shape[1]),
        hidden=x.new_empty(num_rows, intermediate_size),
        d_gate=x.new_empty(num_rows, intermediate_size),
        d_up=x.new_empty(num_rows, intermediate_size),
        shared_hidden=x.new_empty(len(x), shared_size),
        shared_d_gate=x.new_empty(len(x), shared_size),
        shared_d_up=x.new_empty(len(x), shared_size),
    )


def _gradient_tensors(
    workspace: Workspace, weights: dict[str, Tensor | None], main_grads: Sequence[Tensor | None] | None
) -> dict[str, Any]:
    """Where the six weight gradients go, by the names of csrc/call.h, and what becomes of them."""
    named = {
        name.replace("w_", "d_", 1): weight
        for name, weight in weights.items()
        if weight is not None and not name.startswith("w_dgrad")
    }
    if main_grads is None:
        return {name: torch.empty_like(weight) for name, weight in named.items()}
    if len(main_grads) != len(MAIN_GRADS):
        raise ValueError(f"main_grads must be six tensors ({', '.join(MAIN_GRADS)}), got {len(main_grads)}")
    given = dict(zip(MAIN_GRADS, main_grads, strict=True))
    dtype = next((t.dtype for t in main_grads if isinstance(t, Tensor)), None)
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"main_grads must all be torch.bfloat16 or all torch.float32, got {dtype}")
    for name, tensor in given.items():
        if name not in named:
            if tensor is not None:
                raise ValueError(f"main_grads: {name} must be None without a shared expert")
            continue
        check_tensor(f"main_grads: {name}", tensor, dtype, workspace)
        check_shape(f"main_grads: {name}", tensor, tuple(named[name].shape), "the weight's shape")
    # Only that the name is there says what becomes of the sums.
    flag = "gradients_fp32" if dtype == torch.float32 else "gradients_bf16"
    return {name: given[name] for name in named} | {flag: given["d_routed_gate"]}


def _weight_results(gradients: dict[str, Any], main_grads: Sequence[Tensor | None] | None) -> tuple[Tensor | None, ...]:
    order = ("d_routed_gate", "d_routed_up", "d_routed_down", "d_shared_gate", "d_shared_up", "d_shared_down")
    return tuple(gradients.get(name) if main_grads is None else None for name in order)


def _check_backward(
    workspace: Workspace,
    config: MoKConfig,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    d_output: Tensor,
    x: Tensor,
    sizes: tuple[int, int, int],
) -> None:
    check_config(workspace, config)
    if workspace.device.type != "cpu":
        raise ValueError(f"backward runs on CPU ranks only, the workspace is on {workspace.device}")
    check_tensor("d_output", d_output, torch.bfloat16, workspace)
    check_shape("d_output", d_output, tuple(x.shape), "[T, H]")
    if not isinstance(context, MoKForwardContext):
        raise TypeError(f"context must be a MoKForwardContext, got {type(context).__name__}")
    want = empty_context(x.to("meta"), min(config.macrobatch_size, schedule.peer_rank.numel()), *sizes[1:])  # shapes
    if context.x.numel() == 0 and want.x.numel():
        raise ValueError("context is empty: forward ran with save_context=False; call recompute_forward_context first")
    for item in fields(context):
        tensor = getattr(context, item.name)
        check_tensor(f"context.{item.name}", tensor, torch.bfloat16, workspace)
        check_shape(f"context.{item.name}", tensor, tuple(getattr(want, item.name).shape), "as forward made it")


def _check_dgrad_context(workspace: Workspace, given: MoKDgradContext, want: MoKDgradContext) -> None:
    if not isinstance(given, MoKDgradContext):
        raise TypeError(f"dgrad_context must be a MoKDgradContext, got {type(given).__name__}")
    for item in fields(given):
        tensor = getattr(given, item.name)
        check_tensor(f"dgrad_context.{item.name}", tensor, torch.bfloat16, workspace)
        check_shape(
            f"dgrad_context.{item.name}", tensor, tuple(getattr(want, item.name).shape), "as backward_dgrad made it"
        )


def _check_ring_holds_all(config: MoKConfig, schedule: MoKSchedule) -> None:
    capacity_rows = schedule.peer_rank.numel()
    if config.macrobatch_size < capacity_rows:
        raise ValueError(
            f"dgrad and wgrad apart need a ring that holds all rows: macrobatch_size is {config.macrobatch_size}, "
            f"{capacity_rows} rows may come"
        )
