"""The layer's gradients in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.reference.checks import check
from mok_modular.reference.forward import moe_ranks, shared_expert
from mok_modular.stages import (
    dispatch,
    grouped_dgrad,
    grouped_gemm,
    reduce,
    reverse_combine,
    reverse_dispatch,
    schedule,
    swiglu_backward,
    wgrad,
)


class LayerGradients(NamedTuple):
    """One rank's gradients, in the order of functional.backward: of its tokens (x [T, H], router_weights [T, K]), of
    the experts that it owns ([El, I, H], [El, I, H], [El, H, I]), and of the shared expert over its own tokens
    ([S, H], [S, H], [H, S]; None without one)."""

    x: Tensor
    router_weights: Tensor
    routed_gate: Tensor
    routed_up: Tensor
    routed_down: Tensor
    shared_gate: Tensor | None
    shared_up: Tensor | None
    shared_down: Tensor | None


@full_precision()
def layer_backward(
    d_outputs: Sequence[Tensor],
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    w_shared_gate: Tensor | None = None,
    w_shared_up: Tensor | None = None,
    w_shared_down: Tensor | None = None,
    swiglu_limit: float | None = None,
    *,
    row_block: int = 128,
) -> list[LayerGradients]:
    """Returns every rank's gradients for ``d_outputs`` ([T_r, H] by rank, in the dtype of ``xs``); the other arguments
    are those of ``reference.moe_ranks``. A missing route's router gradient is zero; an expert without rows gets zeros.

    float32 and float64 go through autograd of ``moe_ranks``: no derivative is written down a second time, so they are
    an independent truth.

    bfloat16 rounds as the library does. ``d_h = bf16(d_output W_down)`` comes before the router weight, so that
    ``d_router = sum over I of d_h * h`` (float32, groups of 32 columns ascending) is right for weights of zero and
    below it. ``d_h * w`` and SwiGLU's backward are float32 up to d_gate and d_up; ``w * h`` is rounded for the down
    weight's gradient. Gate's and up's parts of d_x share one accumulator and are rounded once a route; the routes are
    added in float32, k ascending, to the shared expert's bfloat16 d_x. Weight gradients accumulate in float32.

    Raises what ``reference.moe_ranks`` raises, and ValueError or TypeError for ``d_outputs`` that do not fit.
    """
    routed, shared = (w_routed_gate, w_routed_up, w_routed_down), (w_shared_gate, w_shared_up, w_shared_down)
    check(xs, expert_ids, router_weights, routed, shared)
    for rank, (d_output, x) in enumerate(zip(d_outputs, xs, strict=True)):
        if d_output.dtype != x.dtype:
            raise TypeError(f"d_output of rank {rank} has dtype {d_output.dtype}; it must have that of x, {x.dtype}")
        if d_output.shape != x.shape:
            raise ValueError(f"d_output of rank {rank} must be {list(x.shape)}, not {list(d_output.shape)}")
    if xs[0].dtype != torch.bfloat16:
        return _by_autograd(d_outputs, xs, expert_ids, router_weights, routed, shared, swiglu_limit)
    with torch.no_grad():
        return _as_the_library(
            d_outputs, xs, expert_ids, router_weights, routed, shared, swiglu_limit, row_block=row_block
        )


def _by_autograd(
    d_outputs: Sequence[Tensor],
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
    swiglu_limit: float | None,
) -> list[LayerGradients]:
    """Every rank has leaves of its own for the shared expert, whose gradients are those of its tokens."""
    num_ranks = len(xs)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    with torch.enable_grad():
        own_xs = [leaf(x) for x in xs]
        own_weights = [leaf(w.to(x.dtype)) for w, x in zip(router_weights, xs, strict=True)]
        own_routed = (leaf(routed[0]), leaf(routed[1]), leaf(routed[2]))
        own_shared = [tuple(None if w is None else leaf(w) for w in shared) for _ in xs]
        outs = moe_ranks(own_xs, expert_ids, own_weights, *own_routed, swiglu_limit=swiglu_limit, row_block=1)
        for rank in range(num_ranks):  # the layer is the sum of its routed and its shared part
            gate, up, down = own_shared[rank]
            alone = shared_expert(own_xs[rank], gate, up, down, swiglu_limit)
            outs[rank] = outs[rank] if alone is None else outs[rank] + alone
        inputs = [*own_xs, *own_weights, *own_routed, *(w for part in own_shared for w in part if w is not None)]
        found = iter(torch.autograd.grad(outs, inputs, list(d_outputs), allow_unused=True, materialize_grads=True))
    d_xs, d_weights = [next(found) for _ in xs], [next(found) for _ in xs]
    d_routed = [next(found).chunk(num_ranks) for _ in routed]
    d_shared = [[None if w is None else next(found) for w in part] for part in own_shared]
    return [
        LayerGradients(d_xs[rank], d_weights[rank], *(d[rank] for d in d_routed), *d_shared[rank])
        for rank in range(num_ranks)
    ]


def _as_the_library(
    d_outputs: Sequence[Tensor],
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
    swiglu_limit: float | None,
    *,
    row_block: int,
) -> list[LayerGradients]:
    num_ranks, topk = len(xs), expert_ids[0].shape[1]
    tables = schedule.reference(expert_ids, num_experts=len(routed[0]), row_block=row_block)
    rows = dispatch.reference(xs, tables, topk=topk)
    d_rows = reverse_combine.reference(d_outputs, router_weights, tables, topk=topk)
    w_gate, w_up, w_down = (weight.chunk(num_ranks) for weight in routed)
    experts = [
        experts_backward(
            *d_rows[rank],
            rows[rank],
            w_gate[rank],
            w_up[rank],
            w_down[rank],
            table.segment_start,
            table.segment_num_rows,
            swiglu_limit,
        )
        for rank, table in enumerate(tables)
    ]
    cells = reverse_dispatch.reference([expert[0] for expert in experts], [expert[1] for expert in experts], tables)
    gradients = []
    for rank, (x, ids) in enumerate(zip(xs, expert_ids, strict=True)):
        d_shared = shared_expert_backward(d_outputs[rank], x, *shared, swiglu_limit)
        one = torch.ones(ids.shape, device=x.device)
        d_x_cells, d_router = cells[rank]
        d_x = reduce.reference(d_x_cells, one, ids >= 0, d_shared[0])
        gradients.append(LayerGradients(d_x, d_router.view(ids.shape), *experts[rank][2:], *d_shared[1:]))
    return gradients


@full_precision()
def experts_backward(
    d_rows: Tensor,
    row_weights: Tensor,
    rows: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    segment_start: Tensor,
    segment_num_rows: Tensor,
    swiglu_limit: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward of one rank's experts, bfloat16. ``d_rows`` and ``rows`` [num_rows, H] are d_output and x of each
    row, ``row_weights`` [num_rows] float32 its router weight. Returns d_x of each row [num_rows, H], its d_router by
    groups of columns [num_rows, I/32] float32, and the gradients of the three weights."""
    segments = (segment_start, segment_num_rows)
    gate, up = grouped_gemm.reference(rows, (w_gate, w_up), *segments)
    d_h = grouped_dgrad.reference(d_rows, w_down, *segments)
    d_gate, d_up, weighted_h, partials = swiglu_backward.reference(d_h, gate, up, row_weights, swiglu_limit)
    d_x = grouped_dgrad.reference((d_gate, d_up), (w_gate, w_up), *segments)
    return (
        d_x,
        partials,
        wgrad.reference(d_gate, rows, *segments).bfloat16(),
        wgrad.reference(d_up, rows, *segments).bfloat16(),
        wgrad.reference(d_rows, weighted_h, *segments).bfloat16(),
    )


@full_precision()
def shared_expert_backward(
    d_output: Tensor,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor | None,
    w_down: Tensor | None,
    swiglu_limit: float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """d_x [T, H] and the gradients of the three weights, as an expert whose only segment is all tokens, each with a
    router weight of one; four times None without weights."""
    if w_gate is None or w_up is None or w_down is None:
        return None, None, None, None
    start = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    one = torch.ones(len(x), device=x.device)
    d_x, _, d_gate, d_up, d_down = experts_backward(
        d_output, one, x, w_gate[None], w_up[None], w_down[None], start, start[1:], swiglu_limit
    )
    return d_x, d_gate[0], d_up[0], d_down[0]
