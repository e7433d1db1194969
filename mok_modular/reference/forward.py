"""The layer's forward in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.reference.checks import check
from mok_modular.stages import (
    combine,
    dispatch,
    grouped_gemm,
    reduce,
    schedule,
    swiglu,
)


def moe(
    x: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    w_shared_gate: Tensor | None = None,
    w_shared_up: Tensor | None = None,
    w_shared_down: Tensor | None = None,
    swiglu_limit: float | None = None,
) -> Tensor:
    """Returns the layer's output [T, H] for one set of tokens, in the dtype of ``x``.

    ``x`` [T, H] is bfloat16, float32 or float64 and so are all weights: ``w_routed_gate`` and ``w_routed_up``
    [E, I, H], ``w_routed_down`` [E, H, I], ``w_shared_gate`` and ``w_shared_up`` [S, H], ``w_shared_down``
    [H, S] (all three or none). ``expert_ids`` [T, K] is int32 or int64, -1 for no route; ``router_weights``
    [T, K] is float32 (float64 also when x is float64). ``swiglu_limit`` holds for the shared expert too.

    A token's output depends on that token alone, so this is also the answer for tokens spread over any number
    of ranks, up to the order in which torch sums inside a matrix product.

    Raises TypeError for dtypes, ValueError for shapes and for expert ids out of range (with their count).
    """
    weights = (w_routed_gate, w_routed_up, w_routed_down, w_shared_gate, w_shared_up, w_shared_down)
    # One rank, and row blocks of one row: no padding.
    return moe_ranks([x], [expert_ids], [router_weights], *weights, swiglu_limit, row_block=1)[0]


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
    *,
    row_block: int = 128,
) -> list[Tensor]:
    """Returns every rank's output [T_r, H], by the library's way: schedule, dispatch, experts, combine.

    ``xs``, ``expert_ids`` and ``router_weights`` are lists by rank of what ``moe`` takes (T_r may differ and
    may be 0); the weights are those of all E experts, and rank r computes with experts r*E/R up to (r+1)*E/R.

    Raises what ``moe`` raises, and ValueError for lists of different lengths and for E not divisible by R.
    """
    routed, shared = (w_routed_gate, w_routed_up, w_routed_down), (w_shared_gate, w_shared_up, w_shared_down)
    check(xs, expert_ids, router_weights, routed, shared)
    num_ranks, num_experts, topk = len(xs), len(w_routed_gate), expert_ids[0].shape[1]
    tables = schedule.reference(expert_ids, num_experts=num_experts, row_block=row_block)
    rows = dispatch.reference(xs, tables, topk=topk)
    ys = [
        _experts(rank_rows, gate, up, down, table.segment_start, table.segment_num_rows, swiglu_limit)
        for rank_rows, table, gate, up, down in zip(rows, tables, *(w.chunk(num_ranks) for w in routed), strict=True)
    ]
    combined = combine.reference(ys, tables)
    return [
        reduce.reference(cells, weights, ids >= 0, shared_expert(x, *shared, swiglu_limit))
        for cells, x, ids, weights in zip(combined, xs, expert_ids, router_weights, strict=True)
    ]


def _experts(
    rows: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    segment_start: Tensor,
    segment_num_rows: Tensor,
    swiglu_limit: float | None,
) -> Tensor:
    """The experts of one rank on their rows [num_rows, H] -> [num_rows, H]."""
    gate, up = grouped_gemm.reference(rows, (w_gate, w_up), segment_start, segment_num_rows)
    h = swiglu.reference(gate, up, swiglu_limit)
    return grouped_gemm.reference(h, w_down, segment_start, segment_num_rows)


@full_precision()
def shared_expert(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor | None, w_down: Tensor | None, swiglu_limit: float | None
) -> Tensor | None:
    """The shared expert on all tokens [T, H]: one segment that holds every token. None without weights."""
    if w_gate is None or w_up is None or w_down is None:
        return None
    segment_start = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    return _experts(x, w_gate[None], w_up[None], w_down[None], segment_start, segment_start[1:], swiglu_limit)


# ---- backward ----


# ---- checks ----
