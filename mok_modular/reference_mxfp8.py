"""The whole layer in plain torch with MXFP8 operands, forward and backward, quantized where the library quantizes.

    outputs = forward(xs, expert_ids, router_weights, *routed_weights, *shared_weights)
    gradients = backward(d_outputs, xs, expert_ids, router_weights, *routed_weights, *shared_weights)

Which operand has its scales along which axis (always the one that the product sums over):

    forward          x and h by row; weights by row
    input gradients  d_output, d_gate, d_up by row; weights by column
    weight gradients x, d_output, d_gate, d_up: by row first, then by 32 rows of a column; w*h: by column alone

Gate and up are kept in bfloat16, so h is recomputed as it was; d_router and w*h meet that h. The shared expert is not
quantized. Gradients pass straight through a quantization. float32 and float64 tensors are neither quantized nor
rounded: what is left is the exact layer, written out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .stages import combine, dispatch, grouped_gemm, reduce, schedule, swiglu
from .stages.quantize import round_trip


@dataclass(frozen=True, eq=False)
class Gradients:
    """Lists by rank, and the routed weights' gradients of all E experts. Shared ones are those of the rank's own
    tokens; empty lists without a shared expert. Router weights' gradients have the dtype of the router weights."""

    x: list[Tensor]
    router_weights: list[Tensor]
    routed_gate: Tensor
    routed_up: Tensor
    routed_down: Tensor
    shared_gate: list[Tensor]
    shared_up: list[Tensor]
    shared_down: list[Tensor]


def forward(
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
    """Returns every rank's output [T_r, H]. Arguments as of `reference.moe_ranks`, weights in the dtype of ``xs``; H, I
    and S are multiples of 128 unless nothing is quantized. Raises what the stages' references raise."""
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    layer = _Layer(xs, expert_ids, routed)
    ys = []
    for rows, segments, gate, up, down in layer.ranks():
        h = swiglu.reference(*grouped_gemm.reference(rows, (gate, up), *segments), swiglu_limit)
        ys.append(grouped_gemm.reference(_quantized(h), down, *segments))
    outputs = []
    cells = combine.reference(ys, layer.tables)
    for rank_cells, x, ids, weights in zip(cells, xs, expert_ids, router_weights, strict=True):
        shared = None
        if w_shared_gate is not None and w_shared_up is not None and w_shared_down is not None:
            h = swiglu.reference(_product(x, w_shared_gate), _product(x, w_shared_up), swiglu_limit)
            shared = _product(h, w_shared_down)
        outputs.append(reduce.reference(rank_cells, weights, ids >= 0, shared))
    return outputs


def backward(
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
) -> Gradients:
    """Returns the gradients for ``d_outputs`` [T_r, H] by rank; the other arguments as in `forward`."""
    dtype, topk = xs[0].dtype, expert_ids[0].shape[1]
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    layer = _Layer(xs, expert_ids, routed)
    by_column = [_quantized(w, dim=-2).chunk(len(xs)) for w in routed]
    d_rows = dispatch.reference([_quantized(d) for d in d_outputs], layer.tables, topk=topk)

    d_row_xs, d_row_weights = [], []
    d_routed: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for rank, (rows, segments, gate_weight, up_weight, _) in enumerate(layer.ranks()):
        table = layer.tables[rank]
        gate, up = grouped_gemm.reference(rows, (gate_weight, up_weight), *segments)
        weights = _of_rows(router_weights, table).to(_wide(dtype))[:, None]
        back_gate, back_up, back_down = (w[rank].mT for w in by_column)
        d_h = grouped_gemm.reference(d_rows[rank], back_down, *segments)
        h = swiglu.reference(gate, up, swiglu_limit)
        d_row_weights.append((d_h.to(_wide(dtype)) * h.to(_wide(dtype))).sum(1))
        d_gate, d_up = _swiglu_backward(gate, up, d_h.to(_wide(dtype)) * weights, swiglu_limit)
        d_gate, d_up = _quantized(d_gate), _quantized(d_up)
        # One sum over both halves: gate's columns, then up's.
        d_row_xs.append(
            grouped_gemm.reference(torch.cat([d_gate, d_up], 1), torch.cat([back_gate, back_up], 2), *segments)
        )
        weighted_h = (weights * h.to(_wide(dtype))).to(dtype)
        of_gradient = [_quantized(t, dim=0) for t in (rows, d_rows[rank], d_gate, d_up, weighted_h)]
        for start, count in zip(table.segment_start.tolist(), table.segment_num_rows.tolist(), strict=False):
            x, d_y, d_g, d_u, wh = (t[start : start + count] for t in of_gradient)
            for out, (left, right) in zip(d_routed, ((d_g, x), (d_u, x), (d_y, wh)), strict=True):
                out.append(_product(left.mT, right.mT))

    d_xs, d_weights = [], []
    shared_gradients: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    d_x_cells = combine.reference(d_row_xs, layer.tables)
    d_weight_cells = combine.reference([d[:, None] for d in d_row_weights], layer.tables)
    for rank, (x, d_output, ids) in enumerate(zip(xs, d_outputs, expert_ids, strict=True)):
        d_x = None
        if w_shared_gate is not None and w_shared_up is not None and w_shared_down is not None:
            gate, up = _product(x, w_shared_gate), _product(x, w_shared_up)
            d_h = _product(d_output, w_shared_down.mT).to(_wide(dtype))
            d_gate, d_up = _swiglu_backward(gate, up, d_h, swiglu_limit)
            both = torch.cat([d_gate, d_up], 1), torch.cat([w_shared_gate, w_shared_up]).mT
            d_x = _product(*both)
            h = swiglu.reference(gate, up, swiglu_limit)
            for out, (left, right) in zip(shared_gradients, ((d_gate, x), (d_up, x), (d_output, h)), strict=True):
                out.append(_product(left.mT, right.mT))
        ones = torch.ones(ids.shape, dtype=_wide(dtype))
        d_xs.append(reduce.reference(d_x_cells[rank], ones, ids >= 0, d_x))
        d_weights.append(d_weight_cells[rank].view(ids.shape).to(router_weights[rank].dtype))
    d_gates, d_ups, d_downs = (torch.stack(d) for d in d_routed)
    return Gradients(d_xs, d_weights, d_gates, d_ups, d_downs, *shared_gradients)


class _Layer:
    """Tables and dispatched rows of every rank, with its share of the weights."""

    def __init__(
        self, xs: Sequence[Tensor], expert_ids: Sequence[Tensor], routed: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        # The row block is any: blocks of 32 rows start where a segment does.
        self.tables = schedule.reference(expert_ids, num_experts=len(routed[0]), row_block=128)
        self.rows = dispatch.reference([_quantized(x) for x in xs], self.tables, topk=expert_ids[0].shape[1])
        self.weights = [_quantized(w).chunk(len(xs)) for w in routed]

    def ranks(self) -> list[tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor]]:
        """Rows, segments (start, num_rows), gate, up and down of every rank."""
        segments = [(table.segment_start, table.segment_num_rows) for table in self.tables]
        return list(zip(self.rows, segments, *self.weights, strict=True))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] @ right [N, K]^T, summed wide and rounded once."""
    wide = _wide(left.dtype)
    return (left.to(wide) @ right.to(wide).mT).to(left.dtype)


def _quantized(values: Tensor, dim: int = -1) -> Tensor:
    """The values after MXFP8 quantization along `dim`; float32 and float64 stay as they are."""
    return round_trip(values, dim) if values.dtype == torch.bfloat16 and values.numel() else values


def _of_rows(values: Sequence[Tensor], table: schedule.ScheduleTables) -> Tensor:
    """Each route's value [T, K] by rank, in the rows of `table`; zero in padding."""
    flat = torch.cat([v.reshape(-1) for v in values])
    num_routes = torch.tensor([v.numel() for v in values])
    first = (num_routes.cumsum(0) - num_routes)[table.peer_rank.clamp(min=0).long()]
    is_filled = table.peer_rank >= 0
    idx = torch.where(is_filled, first + table.peer_token_idx, 0)
    return torch.where(is_filled, flat[idx], 0) if len(flat) else flat.new_zeros(len(idx))


def _swiglu_backward(gate: Tensor, up: Tensor, d_h: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """d_gate and d_up, rounded once, from the wide d_h. A clamp lets the gradient through at equality."""
    g, u = gate.to(d_h.dtype), up.to(d_h.dtype)
    gate_passes = up_passes = torch.ones_like(g, dtype=torch.bool)
    if limit is not None:
        gate_passes, up_passes = ~(g > limit), ~(u.abs() > limit)
        g, u = torch.where(gate_passes, g, limit), u.clamp(-limit, limit)
    sigmoid = g.sigmoid()
    d_gate = d_h * u * (sigmoid * (1 + g * (1 - sigmoid)))
    d_up = d_h * (g * sigmoid)
    return torch.where(gate_passes, d_gate, 0).to(gate.dtype), torch.where(up_passes, d_up, 0).to(up.dtype)
