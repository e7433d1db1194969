"""Grouped GEMM: each local expert multiplies its own segment of rows by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.stages.tables import check_segments
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@overload
def reference(rows: Tensor, weight: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> Tensor: ...
@overload
def reference(
    rows: Tensor, weight: tuple[Tensor, Tensor], segment_start: Tensor, segment_num_rows: Tensor
) -> tuple[Tensor, Tensor]: ...
@full_precision()
def reference(
    rows: Tensor, weight: Tensor | tuple[Tensor, Tensor], segment_start: Tensor, segment_num_rows: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns ``rows @ weight[expert].T`` [num_rows, N], segment by segment, in the dtype of ``rows``: one weight is
    the down projection, a pair is gate and up and gives a pair.

    ``rows`` is [num_rows, Kdim] and ``weight`` [El, N, Kdim], both bfloat16, float32 or float64.
    ``segment_start`` (int32 [El+1]) and ``segment_num_rows`` (int32 [El]) come from the schedule. bfloat16 is
    multiplied and summed in float32 and rounded once at the end; the other dtypes keep their own precision.

    Padding rows are never read (they may hold NaN) and come out as zeros, as do rows past the last segment;
    their gradient is zero. An expert without rows gets a weight gradient of exact zeros.

    Raises TypeError when the dtypes differ, ValueError for wrong shapes and for segments that overlap or pass
    the end.
    """
    if isinstance(weight, Tensor):
        return _multiply(rows, weight, segment_start, segment_num_rows)
    gate, up = _pair(weight)
    return (
        _multiply(rows, gate, segment_start, segment_num_rows),
        _multiply(rows, up, segment_start, segment_num_rows),
    )


@overload
def launch(
    rows: Tensor,
    weight: Tensor,
    segment_start: Tensor,
    segment_num_rows: Tensor,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> Tensor: ...
@overload
def launch(
    rows: Tensor,
    weight: tuple[Tensor, Tensor],
    segment_start: Tensor,
    segment_num_rows: Tensor,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> tuple[Tensor, Tensor]: ...
def launch(
    rows: Tensor,
    weight: Tensor | tuple[Tensor, Tensor],
    segment_start: Tensor,
    segment_num_rows: Tensor,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``reference`` by the compiled stages gate_up (a pair of weights) and down, each alone in its kernel, on the one
    rank of ``group`` (a fresh LocalGroup if None). All tensors are bfloat16 on the CPU or a GPU, where
    the kernel then runs; no gradients. The sums of a row run over k ascending, whatever rows stand beside it.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device, for Kdim or N
    that is no multiple of 64 and for segments that are not as many row blocks as their rows need.
    """
    device = stage_arguments.check_devices(
        rows=rows, weight=weight, segment_start=segment_start, segment_num_rows=segment_num_rows
    )
    is_pair = not isinstance(weight, Tensor)
    weights = _pair(weight) if not isinstance(weight, Tensor) else (weight,)
    for each in weights:
        _check(rows, each, segment_start, segment_num_rows)
    stage_arguments.check_bfloat16(rows=rows)
    num_cols, num_k = weights[0].shape[1:]
    stage_arguments.check_width("Kdim", num_k)
    stage_arguments.check_width("N", num_cols)
    run = stage_run.open_run(
        "gate_up" if is_pair else "down",
        [stage_arguments.segment_tables(segment_start, segment_num_rows, row_block)],
        row_block=row_block,
        num_tokens=[0],
        hidden_size=num_k if is_pair else num_cols,
        intermediate_size=num_cols if is_pair else num_k,
        device=device,
        group=group,
    )
    num_rows = int(segment_start[-1])
    run.fill(0, "ring_x" if is_pair else "ring_hidden", rows[:num_rows])
    names = ("w_routed_gate", "w_routed_up") if is_pair else ("w_routed_down",)
    run.launch([{name: each.detach().contiguous() for name, each in zip(names, weights, strict=True)}])

    def result(region: str) -> Tensor:
        out = rows.new_zeros(len(rows), num_cols)
        out[:num_rows] = run.region(0, region, num_cols)[:num_rows]
        return out

    return (result("ring_gate"), result("ring_up")) if is_pair else result("ring_y")


def _multiply(rows: Tensor, weight: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> Tensor:
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


def _pair(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if len(weights) != 2 or weights[0].shape != weights[1].shape:
        shapes = [tuple(w.shape) for w in weights]
        raise ValueError(f"weight must be one tensor or a pair (gate, up) of one shape, not {shapes}")
    return weights[0], weights[1]


def _check(rows: Tensor, weight: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> None:
    if rows.dtype != weight.dtype:
        raise TypeError(f"weight has dtype {weight.dtype} but rows have {rows.dtype}; they must be the same")
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise ValueError(
            "rows must be [num_rows, Kdim] and weight [El, N, Kdim] with the same Kdim, not "
            f"{tuple(rows.shape)} and {tuple(weight.shape)}"
        )
    check_segments(len(weight), segment_start, segment_num_rows, len(rows))
