"""The whole layer in plain torch, put together from the references of its stages. Differentiable, any device.

With bfloat16 tensors it rounds where the library rounds: gate, up, h, y and the shared expert's y, each once,
from float32. Its backward is what autograd makes of that forward: the same gradients mathematically, but not
the library's own rounding points. float32 and float64 tensors are computed without extra rounding, for
gradient checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .stages import combine, dispatch, grouped_gemm, reduce, schedule, swiglu

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


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
    _check(xs, expert_ids, router_weights, routed, shared)
    num_ranks, num_experts, topk = len(xs), len(w_routed_gate), expert_ids[0].shape[1]
    tables = schedule.reference(expert_ids, num_experts=num_experts, row_block=row_block)
    rows = dispatch.reference(xs, tables, topk=topk)
    ys = [
        _experts(rank_rows, gate, up, down, table.segment_start, table.segment_num_rows, swiglu_limit)
        for rank_rows, table, gate, up, down in zip(rows, tables, *(w.chunk(num_ranks) for w in routed), strict=True)
    ]
    combined = combine.reference(ys, tables)
    return [
        reduce.reference(cells, weights, ids >= 0, _shared_expert(x, *shared, swiglu_limit))
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


def _shared_expert(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor | None, w_down: Tensor | None, swiglu_limit: float | None
) -> Tensor | None:
    """The shared expert on all tokens [T, H]: one segment that holds every token. None without weights."""
    if w_gate is None or w_up is None or w_down is None:
        return None
    segment_start = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
    return _experts(x, w_gate[None], w_up[None], w_down[None], segment_start, segment_start[1:], swiglu_limit)


def _check(
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """That the arguments fit together; the stages check the dtypes and values that are theirs."""
    if not len(xs) == len(expert_ids) == len(router_weights) > 0:
        raise ValueError(
            "xs, expert_ids and router_weights must have one entry per rank, not "
            f"{len(xs)}, {len(expert_ids)} and {len(router_weights)}"
        )
    for rank, (x, ids, weights) in enumerate(zip(xs, expert_ids, router_weights, strict=True)):
        if x.dtype not in _DTYPES:
            raise TypeError(f"x of rank {rank} has dtype {x.dtype}; it must be one of {', '.join(map(str, _DTYPES))}")
        if x.dim() != 2 or ids.dim() != 2 or ids.shape[1] < 1 or len(ids) != len(x) or weights.shape != ids.shape:
            raise ValueError(
                f"on rank {rank} x must be [T, H], expert_ids and router_weights [T, K] with the same T and "
                f"K >= 1, not {tuple(x.shape)}, {tuple(ids.shape)} and {tuple(weights.shape)}"
            )
    if len({(x.dtype, x.shape[1]) for x in xs}) > 1:
        raise ValueError(f"x must have one dtype and H on all ranks, not {[(x.dtype, x.shape[1]) for x in xs]}")
    dtype, hidden_size = xs[0].dtype, xs[0].shape[1]
    gate, _, down = routed
    if gate.dim() != 3 or down.dim() != 3:
        raise ValueError(f"routed weights must have three dimensions, not {[tuple(w.shape) for w in routed]}")
    num_experts, intermediate_size = gate.shape[:2]
    w_in, w_out = (num_experts, intermediate_size, hidden_size), (num_experts, hidden_size, intermediate_size)
    _check_weights("routed", routed, (w_in, w_in, w_out), dtype)
    given = [w for w in shared if w is not None]
    if len(given) not in (0, 3):
        raise ValueError(f"shared weights must be all three or none, not {len(given)} of them")
    if given:
        shared_size = len(given[0])
        w_in_shared = (shared_size, hidden_size)
        _check_weights("shared", given, (w_in_shared, w_in_shared, (hidden_size, shared_size)), dtype)


def _check_weights(kind: str, weights: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    for name, weight, shape in zip(("gate", "up", "down"), weights, shapes, strict=True):
        if weight.dtype != dtype:
            raise TypeError(f"w_{kind}_{name} has dtype {weight.dtype}; it must have that of x, {dtype}")
        if tuple(weight.shape) != shape:
            raise ValueError(f"w_{kind}_{name} must be {list(shape)}, not {list(weight.shape)}")
