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

from .reference import LayerGradients, _shared_expert, _sum_by_groups, shared_expert_backward, swiglu_backward
from .stages import combine, dispatch, grouped_gemm, reduce, schedule, swiglu
from .stages.quantize import round_trip

Segments = tuple[Tensor, Tensor]
"""segment_start and segment_num_rows of a rank."""


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
            cells, weights, ids >= 0, _shared_expert(x, w_shared_gate, w_shared_up, w_shared_down, swiglu_limit)
        )
        for cells, x, ids, weights in zip(combine.reference(ys, tables), xs, expert_ids, router_weights, strict=True)
    ]


@torch.no_grad()
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
    d_rows = dispatch.reference([_quantized(d_output) for d_output in d_outputs], tables, topk=topk)
    # A row's router weight: its route is the token of a layer with one expert a token.
    row_weights = dispatch.reference([weights.reshape(-1, 1) for weights in router_weights], tables, topk=1)
    by_column = zip(*(_quantized(w, dim=-2).chunk(num_ranks) for w in routed), strict=True)
    experts = [
        _experts_backward(d_rows[rank], rows, row_weights[rank], segments, (gate, up), columns, swiglu_limit)
        for rank, ((rows, segments, gate, up, _), columns) in enumerate(
            zip(_by_rank(xs, expert_ids, tables, routed), by_column, strict=True)
        )
    ]
    d_x_cells = combine.reference([expert[0] for expert in experts], tables)
    d_router_cells = combine.reference([expert[1] for expert in experts], tables)
    gradients = []
    for rank, (x, ids) in enumerate(zip(xs, expert_ids, strict=True)):
        shared = (w_shared_gate, w_shared_up, w_shared_down)
        d_shared = shared_expert_backward(d_outputs[rank], x, *shared, swiglu_limit)
        d_x = reduce.reference(d_x_cells[rank], torch.ones(ids.shape, device=x.device), ids >= 0, d_shared[0])
        gradients.append(LayerGradients(d_x, d_router_cells[rank].view(ids.shape), *experts[rank][2:], *d_shared[1:]))
    return gradients


def _experts_backward(
    d_rows: Tensor,
    rows: Tensor,
    row_weights: Tensor,
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
    h = swiglu.reference(gate, up, swiglu_limit)
    w_gate, w_up, w_down = by_column
    d_h = grouped_gemm.reference(d_rows, w_down.mT, *segments)
    d_router = _sum_by_groups(d_h.float() * h.float())
    d_gate, d_up = (_quantized(d) for d in swiglu_backward(d_h.float() * row_weights, gate, up, swiglu_limit))
    weighted_h = (row_weights * h.float()).bfloat16()
    w_in = torch.cat([w_gate, w_up], dim=1).mT  # [El, H, 2I]: one accumulation over gate and up
    d_x = grouped_gemm.reference(torch.cat([d_gate, d_up], dim=1), w_in, *segments)
    x, d_y, d_gate, d_up, weighted_h = (_quantized(t, dim=0) for t in (rows, d_rows, d_gate, d_up, weighted_h))
    places = [slice(start, start + count) for start, count in zip(*(s.tolist() for s in segments), strict=False)]

    def weight_gradient(left: Tensor, right: Tensor) -> Tensor:
        return torch.stack([(left[at].float().T @ right[at].float()).bfloat16() for at in places])

    return d_x, d_router, weight_gradient(d_gate, x), weight_gradient(d_up, x), weight_gradient(d_y, weighted_h)


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
