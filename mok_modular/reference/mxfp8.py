"""The whole layer in plain torch with MXFP8 operands, forward and backward, quantized where the library quantizes.

Called as `reference.moe_ranks` and `reference.layer_backward` are, with bfloat16 tensors. Which operand has its scales
along which axis (always the one that the product sums over):

    forward          x and h by row; weights by row
    input gradients  d_output, d_gate, d_up by row; weights by column
    weight gradients x, d_output, d_gate, d_up: by row first, then by 32 rows of a column; w*h: by column alone

Gate and up are kept in bfloat16, so h is computed again as it was; d_router and w*h meet that h. The shared expert is
not quantized. Gradients pass straight through a quantization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.ops import round_trip
from mok_modular.reference.backward import LayerGradients, shared_expert_backward
from mok_modular.reference.forward import shared_expert
from mok_modular.stages import (
    combine,
    dispatch,
    grouped_dgrad,
    grouped_gemm,
    reduce,
    reverse_combine,
    reverse_dispatch,
    schedule,
    swiglu,
    swiglu_backward,
    wgrad,
)

Segments = tuple[Tensor, Tensor]
"""segment_start and segment_num_rows of a rank."""


@full_precision()
def moe_ranks(
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
) -> list[Tensor]:
    """Returns every rank's output [T_r, H] as `reference.moe_ranks` does; H and I are multiples of 32.

    Raises what the stages' references raise.
    """
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    tables = schedule.reference(expert_ids, num_experts=len(w_routed_gate))
    ys = []
    for rows, segments, gate, up, down in _by_rank(xs, expert_ids, tables, routed):
        h = swiglu.reference(*grouped_gemm.reference(rows, (gate, up), *segments), swiglu_limit)
        ys.append(grouped_gemm.reference(_quantized(h), down, *segments))
    return [
        reduce.reference(
            cells, weights, ids >= 0, shared_expert(x, w_shared_gate, w_shared_up, w_shared_down, swiglu_limit)
        )
        for cells, x, ids, weights in zip(combine.reference(ys, tables), xs, expert_ids, router_weights, strict=True)
    ]


@torch.no_grad()
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
) -> list[LayerGradients]:
    """Returns every rank's gradients for ``d_outputs`` as `reference.layer_backward` does, with its rounding points.

    32 rows of a segment share a scale, so weight gradients depend on the order of rows, and with it on the number of
    ranks. Raises what the stages' references raise.
    """
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    num_ranks, topk = len(xs), expert_ids[0].shape[1]
    tables = schedule.reference(expert_ids, num_experts=len(w_routed_gate))
    d_outputs_quantized = [_quantized(d_output) for d_output in d_outputs]
    d_rows = reverse_combine.reference(d_outputs_quantized, router_weights, tables, topk=topk)
    by_column = zip(*(_quantized(w, dim=-2).chunk(num_ranks) for w in routed), strict=True)
    experts = [
        _experts_backward(*d_rows[rank], rows, segments, (gate, up), columns, swiglu_limit)
        for rank, ((rows, segments, gate, up, _), columns) in enumerate(
            zip(_by_rank(xs, expert_ids, tables, routed), by_column, strict=True)
        )
    ]
    cells = reverse_dispatch.reference([expert[0] for expert in experts], [expert[1] for expert in experts], tables)
    gradients = []
    for rank, (x, ids) in enumerate(zip(xs, expert_ids, strict=True)):
        shared = (w_shared_gate, w_shared_up, w_shared_down)
        d_shared = shared_expert_backward(d_outputs[rank], x, *shared, swiglu_limit)
        d_x_cells, d_router = cells[rank]
        d_x = reduce.reference(d_x_cells, torch.ones(ids.shape, device=x.device), ids >= 0, d_shared[0])
        gradients.append(LayerGradients(d_x, d_router.view(ids.shape), *experts[rank][2:], *d_shared[1:]))
    return gradients


def _experts_backward(
    d_rows: Tensor,
    row_weights: Tensor,
    rows: Tensor,
    segments: Segments,
    by_row: tuple[Tensor, Tensor],
    by_column: tuple[Tensor, Tensor, Tensor],
    swiglu_limit: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward of one rank's experts from what is quantized by row, d_output and x of each row [num_rows, H].

    by_row: gate and up, by_column: all three weights, quantized like that. Returns what `reference.experts_backward`
    does.
    """
    gate, up = grouped_gemm.reference(rows, by_row, *segments)
    w_gate, w_up, w_down = by_column
    d_h = grouped_dgrad.reference(d_rows, w_down, *segments)
    d_gate, d_up, weighted_h, partials = swiglu_backward.reference(d_h, gate, up, row_weights, swiglu_limit)
    d_gate, d_up = _quantized(d_gate), _quantized(d_up)
    d_x = grouped_dgrad.reference((d_gate, d_up), (w_gate, w_up), *segments)
    x, d_y, d_gate, d_up, weighted_h = (_quantized(t, dim=0) for t in (rows, d_rows, d_gate, d_up, weighted_h))
    products = ((d_gate, x), (d_up, x), (d_y, weighted_h))
    d_w_gate, d_w_up, d_w_down = (wgrad.reference(*pair, *segments).bfloat16() for pair in products)
    return d_x, partials, d_w_gate, d_w_up, d_w_down


def _by_rank(
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    tables: Sequence[schedule.ScheduleTables],
    routed: tuple[Tensor, Tensor, Tensor],
) -> list[tuple[Tensor, Segments, Tensor, Tensor, Tensor]]:
    """Dispatched rows, segments, gate, up and down of every rank, quantized by row."""
    rows = dispatch.reference([_quantized(x) for x in xs], tables, topk=expert_ids[0].shape[1])
    segments = [(table.segment_start, table.segment_num_rows) for table in tables]
    return list(zip(rows, segments, *(_quantized(w).chunk(len(xs)) for w in routed), strict=True))


def _quantized(values: Tensor, dim: int = -1) -> Tensor:
    """The values after MXFP8 quantization along `dim`."""
    return round_trip(values, dim) if values.numel() else values
