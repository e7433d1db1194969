"""Quantize: what weight gradients multiply in MXFP8, with one scale for 32 rows of a column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.ops import BLOCK, TILE, round_trip
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(rows: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> Tensor:
    """Returns the values of ``rows`` [num_rows, W] after MXFP8 quantization along the rows, [num_rows, W].

    ``rows`` is bfloat16 with W a multiple of 128; ``segment_start`` (int32 [El+1]) and ``segment_num_rows`` (int32
    [El]) come from the schedule: a segment starts at a whole block of 32 rows. Padding rows are never read (they may
    hold NaN); they count as zeros and come out as zeros, as do rows past the last segment. A NaN takes its whole block
    along, padding too. No gradients.

    Raises TypeError for another dtype, ValueError for wrong shapes and for segments that overlap or pass the end.
    """
    _check(rows, segment_start, segment_num_rows)
    return round_trip(torch.where(_is_filled(rows, segment_start, segment_num_rows), rows, 0), dim=0)


def launch(
    rows: Tensor,
    segment_start: Tensor,
    segment_num_rows: Tensor,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> Tensor:
    """``reference`` by the compiled stage, standing alone in its kernel, on the one rank of ``group`` (a fresh
    LocalGroup if None). ``rows`` is on the CPU.

    Raises what ``reference`` raises, and ValueError for another device and for segments that are not as many row
    blocks as their rows need.
    """
    device = stage_arguments.check_devices(rows=rows, segment_start=segment_start, segment_num_rows=segment_num_rows)
    _check(rows, segment_start, segment_num_rows)
    stage_arguments.check_bfloat16(rows=rows)
    run = stage_run.open_run(
        "quantize",
        [stage_arguments.segment_tables(segment_start, segment_num_rows, row_block)],
        row_block=row_block,
        num_tokens=[0],
        hidden_size=rows.shape[1],
        intermediate_size=TILE,
        kind="backward_wgrad",
        is_mxfp8=True,
        device=device,
        group=group,
    )
    num_rows = int(segment_start[-1])
    # The kernel quantizes all five operands of the weight gradients alike; `rows` stands for x, the first of them.
    # In a layer, dispatch leaves zeros in padding rows.
    run.fill(0, "ring_x", torch.where(_is_filled(rows, segment_start, segment_num_rows), rows, 0)[:num_rows])
    run.launch()
    out = torch.zeros_like(rows)
    out[:num_rows] = run.region(0, "ring_x", rows.shape[1])[:num_rows]
    return out


def _is_filled(rows: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> Tensor:
    """Which rows are no padding, [num_rows, 1]."""
    mask = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device)
    for start, count in zip(segment_start.tolist(), segment_num_rows.tolist(), strict=False):
        mask[start : start + count] = True
    return mask


def _check(rows: Tensor, segment_start: Tensor, segment_num_rows: Tensor) -> None:
    if rows.dtype != torch.bfloat16:
        raise TypeError(f"rows must be torch.bfloat16, got {rows.dtype}")
    if rows.dim() != 2 or rows.shape[1] < TILE or rows.shape[1] % TILE:
        raise ValueError(f"rows must be [num_rows, W] with W a multiple of {TILE} in MXFP8, got {list(rows.shape)}")
    if len(rows) % BLOCK or bool((segment_start % BLOCK != 0).any()):
        raise ValueError(
            f"rows and segments must be whole blocks of {BLOCK} rows, got {len(rows)} rows and segment_start "
            f"{segment_start.tolist()}"
        )
    if segment_start.numel() != segment_num_rows.numel() + 1 or segment_num_rows.numel() < 1:
        raise ValueError(
            f"segment_start must be [El + 1] and segment_num_rows [El], got {list(segment_start.shape)} and "
            f"{list(segment_num_rows.shape)}"
        )
    is_fitting = bool(((segment_num_rows >= 0) & (segment_num_rows <= segment_start.diff())).all())
    if not is_fitting or int(segment_start[0]) != 0 or int(segment_start[-1]) > len(rows):
        raise ValueError(
            f"segments must start at 0, follow one another and end within {len(rows)} rows; segment_start is "
            f"{segment_start.tolist()}, segment_num_rows {segment_num_rows.tolist()}"
        )
