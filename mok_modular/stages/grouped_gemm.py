"""Grouped GEMM: each local expert multiplies its own segment of rows by its own weight."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(rows: Tensor, weight: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> Tensor:
    """Returns ``rows @ weight[expert].T`` [num_rows, N], segment by segment, in the dtype of ``rows``.

    ``rows`` is [num_rows, Kdim] and ``weight`` [El, N, Kdim], both bfloat16, float32 or float64.
    ``segment_start`` (int32 [El+1]) and ``segment_num_rows`` (int32 [El]) come from the schedule. bfloat16 is
    multiplied and summed in float32 and rounded once at the end; the other dtypes keep their own precision.

    Padding rows are never read (they may hold NaN) and come out as zeros, as do rows past the last segment;
    their gradient is zero. An expert without rows gets a weight gradient of exact zeros.

    Raises TypeError when the dtypes differ, ValueError for wrong shapes and for segments that overlap or pass
    the end.
    """
    _check(rows, weight, segment_start, segment_num_rows)
    starts = segment_start.tolist()
    ends = [*starts[1:-1], len(rows)]  # what follows the last segment counts as its padding
    sizes: list[int] = []
    for start, end, num_filled in zip(starts[:-1], ends, segment_num_rows.tolist(), strict=True):
        sizes += [num_filled, end - start - num_filled]

    # split and unbind: their backwards write each gradient once; slices would add up whole tensors of zeros.
    accumulator_dtype = torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype
    segments = rows.split_with_sizes(sizes)
    pieces: list[Tensor] = []
    for filled, padding, expert_weight in zip(segments[::2], segments[1::2], weight.unbind(), strict=True):
        product = filled.to(accumulator_dtype) @ expert_weight.to(accumulator_dtype).T
        pieces += [product.to(rows.dtype), padding.new_zeros(len(padding), weight.shape[1])]
    return torch.cat(pieces)


def _check(rows: Tensor, weight: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> None:
    if rows.dtype != weight.dtype:
        raise TypeError(f"weight has dtype {weight.dtype} but rows have {rows.dtype}; they must be the same")
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise ValueError(
            "rows must be [num_rows, Kdim] and weight [El, N, Kdim] with the same Kdim, not "
            f"{tuple(rows.shape)} and {tuple(weight.shape)}"
        )
    num_experts = len(weight)
    if segment_start.shape != (num_experts + 1,) or segment_num_rows.shape != (num_experts,):
        raise ValueError(
            f"with {num_experts} experts segment_start must be [{num_experts + 1}] and segment_num_rows "
            f"[{num_experts}], not {tuple(segment_start.shape)} and {tuple(segment_num_rows.shape)}"
        )
    room = segment_start.diff()
    is_fitting = bool(((segment_num_rows >= 0) & (segment_num_rows <= room)).all())
    if not is_fitting or int(segment_start[0]) != 0 or int(segment_start[-1]) > len(rows):
        raise ValueError(
            f"segments must start at 0, follow one another and end within {len(rows)} rows; segment_start is "
            f"{segment_start.tolist()}, segment_num_rows {segment_num_rows.tolist()}"
        )
