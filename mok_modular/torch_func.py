"""The layer's calls in eager mode and under torch.func's transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from mok_modular import torch_ops
from mok_modular.torch_ops import NUM_DIFFERENTIABLE, NUM_SCHEDULE_FIELDS, LayerState


def call_layer(
    state: LayerState, tensors: tuple[Tensor | None, ...], expert_ids: Tensor, saves_context: bool
) -> Tensor:
    """build_schedule and forward: the output. `tensors`: the first NUM_DIFFERENTIABLE inputs of torch_ops.forward."""
    schedule = torch_ops.build_schedule(expert_ids, state.handle)
    options = (saves_context, state.main_grads is not None)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        output, *_ = _Forward.apply(state, *options, expert_ids, state.handle, *tensors, *schedule)
        return output
    output, *_ = torch_ops.forward(*tensors, list(schedule), expert_ids, state.handle, *options)
    if not torch.compiler.is_compiling() and output.grad_fn is not None:
        output.grad_fn.state = state  # the backward needs it, also when the layer is gone
    return output


class _ReverseMode(torch.autograd.Function):
    """torch.func needs a Function with a setup_context, which the gradient of a torch.library operator does not have.

    Raises NotImplementedError for forward-mode derivatives: for an operator they would be zero.
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "a MoE layer has no forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad)"
        )

    @staticmethod
    def vmap(*_: Any) -> Any:
        torch_ops.refuse_vmap()


class _Forward(_ReverseMode):
    """torch_ops.forward of (state, saves_context, has_main_grads, expert_ids, handle, *tensors, *schedule)."""

    @staticmethod
    def forward(_: LayerState, saves_context: bool, has_main_grads: bool, *inputs: Any) -> tuple[Tensor, ...]:
        ids, handle, *rest = inputs
        tensors, schedule = rest[:NUM_DIFFERENTIABLE], rest[NUM_DIFFERENTIABLE:]
        return torch_ops.forward(*tensors, schedule, ids, handle, saves_context, has_main_grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.state, saves_context, has_main_grads, ids, handle, *rest = inputs
        tensors, schedule = rest[:NUM_DIFFERENTIABLE], rest[NUM_DIFFERENTIABLE:]
        torch_ops.save_for_backward(ctx, (*tensors, schedule, ids, handle, saves_context, has_main_grads), output)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> tuple[Any, ...]:
        def run(*inputs: Any) -> Any:
            *tensors, schedule, context, handle, has_main_grads = inputs
            return _Backward.apply(has_main_grads, handle, *tensors, *schedule, *context)

        _, _, _, _, _, *needs = ctx.needs_input_grad
        gradients = torch_ops.gradients_of(ctx, run, d_outputs[0], tuple(needs[:NUM_DIFFERENTIABLE]))
        return None, None, None, None, None, *gradients, *[None] * NUM_SCHEDULE_FIELDS


class _Backward(_ReverseMode):
    """torch_ops.backward of (has_main_grads, handle, d_output, *tensors, *schedule, *context)."""

    @staticmethod
    def forward(has_main_grads: bool, handle: Tensor, *inputs: Any) -> Any:
        tensors, rest = inputs[: 1 + NUM_DIFFERENTIABLE], inputs[1 + NUM_DIFFERENTIABLE :]
        schedule, context = list(rest[:NUM_SCHEDULE_FIELDS]), list(rest[NUM_SCHEDULE_FIELDS:])
        return torch_ops.backward(*tensors, schedule, context, handle, has_main_grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing: there is no second derivative."""

    backward = staticmethod(torch_ops.refuse_second_derivative)
