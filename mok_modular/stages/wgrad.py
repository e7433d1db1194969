"""Wgrad: the gradients of the experts' weights, each the sum over its expert's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.stages.tables import check_segments
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup

_TILE_COLS = 128  # of a carry, on the host


@full_precision()
def reference(
    left: Tensor, right: Tensor, segment_start: Tensor, segment_num_rows: Tensor, carry: Tensor | None = None
) -> Tensor:
    """Returns ``left[rows of expert].T @ right[rows of expert]`` for every local expert, [El, M, N]: d_gate and x give
    the gradient of the gate weight, d_up and x that of up, d_y and weighted_hidden (w * h) that of down.

    ``left`` is [num_rows, M] and ``right`` [num_rows, N], both bfloat16, float32 or float64. ``segment_start`` (int32
    [El+1]) and ``segment_num_rows`` (int32 [El]) come from the schedule. ``carry`` [El, M, N], or None for zeros, is
    where the sums start: in a layer whose rows go through the ring several times it holds what an expert has from the
    rows before this window. Sums and carry are float32 for bfloat16, rows in ascending order, and are not rounded here:
    the library rounds a sum to bfloat16, or adds it to main_grads, once the last rows of its expert are in.

    Padding rows are never read (they may hold NaN). An expert without rows gives its carry, or exact zeros.

    Raises TypeError when the dtypes differ, ValueError for wrong shapes and for segments that overlap or pass the end.
    """
    _check(left, right, segment_start, segment_num_rows, carry)
    dtype = _sum_dtype(left)
    shape = (len(segment_num_rows), left.shape[1], right.shape[1])
    sums = left.new_zeros(shape, dtype=dtype) if carry is None else carry.clone()
    for expert, (start, count) in enumerate(zip(segment_start.tolist(), segment_num_rows.tolist(), strict=False)):
        rows = slice(start, start + count)
        sums[expert] += left[rows].to(dtype).T @ right[rows].to(dtype)
    return sums


def launch(
    left: Tensor,
    right: Tensor,
    segment_start: Tensor,
    segment_num_rows: Tensor,
    carry: Tensor | None = None,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> Tensor:
    """``reference`` by the compiled stage, standing alone in its kernel, on the one rank of ``group`` (a fresh
    LocalGroup if None). left and right are bfloat16 on the CPU, M and N multiples of 64; no gradients. Only the first
    expert with rows can have a carry, since a macrobatch ends in one expert.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device, M or N, for
    segments that are not as many row blocks as their rows need, and for a carry of another expert.
    """
    device = stage_arguments.check_devices(
        left=left, right=right, segment_start=segment_start, segment_num_rows=segment_num_rows, carry=carry
    )
    _check(left, right, segment_start, segment_num_rows, carry)
    stage_arguments.check_bfloat16(left=left, right=right)
    num_experts, height, width = len(segment_num_rows), left.shape[1], right.shape[1]
    stage_arguments.check_width("M of left", height)
    stage_arguments.check_width("N of right", width)
    tables = stage_arguments.segment_tables(segment_start, segment_num_rows, row_block)
    num_rows = int(segment_start[-1])
    carried = None if carry is None else _carried_expert(carry, segment_num_rows)
    if carried is not None:
        tables = _behind_a_macrobatch(tables, carried, num_rows, row_block)
    run = stage_run.open_run(
        "wgrad",
        [tables],
        row_block=row_block,
        num_tokens=[0],
        hidden_size=width,
        intermediate_size=height,
        ring_rows=None if carried is None else num_rows,
        generation=-1 if carried is None else 1,
        kind="backward_wgrad",
        device=device,
        group=group,
    )
    # The kernel makes all three gradients alike; gate's, of d_gate and x, are the ones that are looked at.
    run.fill(0, "ring_d_gate", left[:num_rows])
    run.fill(0, "ring_x", right[:num_rows])
    if carry is not None and carried is not None:
        tiles = _tiles(carry[carried])
        run.floats(0, "carry")[: tiles.numel()] = tiles.flatten()
    sums = {
        name: torch.zeros(num_experts, *shape)
        for name, shape in (
            ("d_routed_gate", (height, width)),
            ("d_routed_up", (height, width)),
            ("d_routed_down", (width, height)),
        )
    }
    # Added to zeros in float32, the sums are not rounded.
    run.launch([{**sums, "gradients_fp32": sums["d_routed_gate"]}])
    return sums["d_routed_gate"]


def _sum_dtype(rows: Tensor) -> torch.dtype:
    return torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype


def _carried_expert(carry: Tensor, segment_num_rows: Tensor) -> int | None:
    """The one expert that has a carry; None: it is all zeros."""
    experts = carry.flatten(1).ne(0).any(1).nonzero().flatten().tolist()
    first = segment_num_rows.nonzero().flatten().tolist()[:1]
    if experts and experts != first:
        raise ValueError(
            f"only the first expert with rows can have a carry in the kernel, here {first}; those of {experts} are not "
            "zero"
        )
    return experts[0] if experts else None


def _behind_a_macrobatch(tables: dict[str, Tensor], expert: int, num_rows: int, row_block: int) -> dict[str, Tensor]:
    """The same rows as macrobatch 1, behind as many rows of `expert` that are macrobatch 0."""
    num_blocks = num_rows // row_block
    start, counts = tables["segment_start"].clone(), tables["segment_num_rows"].clone()
    start[expert + 1 :] += num_rows
    counts[expert] += num_rows
    before = torch.full((num_blocks,), expert, dtype=torch.int32)
    return {
        "segment_start": start,
        "segment_num_rows": counts,
        "row_block_expert": torch.cat([before, tables["row_block_expert"]]),
        "window_start": torch.tensor([0, num_blocks, 2 * num_blocks], dtype=torch.int32),
        "generation_window": torch.tensor([0, 1, 2], dtype=torch.int32),
        "counts": torch.tensor([2 * num_rows, 2, 0, 2 * num_rows, 0], dtype=torch.int32),
    }


def _tiles(matrix: Tensor) -> Tensor:
    """As the region `carry` holds a weight: tile by tile, each whole."""
    rows, cols = (-(-size // _TILE_COLS) for size in matrix.shape)
    whole = torch.zeros(rows * _TILE_COLS, cols * _TILE_COLS)
    whole[: matrix.shape[0], : matrix.shape[1]] = matrix
    return whole.view(rows, _TILE_COLS, cols, _TILE_COLS).transpose(1, 2)


def _check(left: Tensor, right: Tensor, segment_start: Tensor, segment_num_rows: Tensor, carry: Tensor | None) -> None:
    if left.dtype != right.dtype:
        raise TypeError(f"right has dtype {right.dtype} but left has {left.dtype}; they must be the same")
    if left.dim() != 2 or right.dim() != 2 or len(left) != len(right):
        raise ValueError(
            "left must be [num_rows, M] and right [num_rows, N] with the same rows, not "
            f"{tuple(left.shape)} and {tuple(right.shape)}"
        )
    num_experts = len(segment_num_rows)
    check_segments(num_experts, segment_start, segment_num_rows, len(left))
    if carry is None:
        return
    if carry.dtype != _sum_dtype(left):
        raise TypeError(f"carry has dtype {carry.dtype}; it must be {_sum_dtype(left)}")
    shape = (num_experts, left.shape[1], right.shape[1])
    if carry.shape != shape:
        raise ValueError(f"carry must be [El, M, N] = {list(shape)}, not {list(carry.shape)}")
