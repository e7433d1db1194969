"""Combine: the experts' output rows return to the ranks that their tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.stages.tables import Tables, check_tables, kernel_tables
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(ys: Sequence[Tensor], schedules: Sequence[Tables], *, direction: str = "push") -> list[Tensor]:
    """Returns the rows [T_r*K, H] that arrive at every source rank, in the dtype of ``ys``.

    ``ys`` holds every rank's expert outputs [num_rows_r, H], ``schedules`` every rank's tables, from either form of
    the schedule stage. Cell ``token*K + k`` is row ``route_row`` of rank ``route_rank``; the cell of a missing route
    (route_rank -1) is zero here; the library leaves it unwritten. ``direction`` says who moves a row, its expert's
    rank (``push``) or its source (``pull``); the result is the same. Differentiable.

    Raises ValueError for wrong shapes, another direction and for a table entry that names no row or cell.
    """
    _check(ys, schedules, direction)
    num_rows = torch.tensor([len(y) for y in ys], device=ys[0].device)
    first_row = num_rows.cumsum(0) - num_rows
    rows = torch.cat(list(ys))
    out = []
    for s in schedules:
        routed = (s.route_rank >= 0).nonzero().squeeze(1)
        row = first_row[s.route_rank[routed].long()] + s.route_row[routed].long()
        combined = rows.new_zeros(len(s.route_rank), rows.shape[1])
        out.append(combined.index_copy(0, routed, rows.index_select(0, row)))
    return out


def launch(
    ys: Sequence[Tensor],
    schedules: Sequence[Tables],
    *,
    direction: str = "push",
    group: LocalGroup | None = None,
) -> list[Tensor]:
    """``reference`` by the compiled stage, on the ranks of ``group`` (a fresh LocalGroup if None). ``ys`` are bfloat16
    on the CPU or a GPU, where the kernel then runs; no gradients. The kernel leaves the cells of missing routes alone,
    so they are zeros beforehand.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device.
    """
    device = stage_arguments.check_devices(ys=ys, schedules=schedules)
    _check(ys, schedules, direction)
    stage_arguments.check_bfloat16(**{f"ys[{rank}]": y for rank, y in enumerate(ys)})
    tables, row_block = kernel_tables(schedules)
    hidden_size = ys[0].shape[1]
    run = stage_run.open_run(
        "combine",
        tables,
        row_block=row_block,
        num_tokens=[len(s.route_rank) for s in schedules],  # a cell a route: as if K were 1
        hidden_size=hidden_size,
        is_pull_combine=direction == "pull",
        device=device,
        group=group,
    )
    for rank, (y, s) in enumerate(zip(ys, schedules, strict=True)):
        run.fill(rank, "ring_y", y[: int(s.segment_start[-1])])
        run.region(rank, "combine", hidden_size)[: len(s.route_rank)][s.route_rank < 0] = 0
    run.launch()
    return [run.region(r, "combine", hidden_size)[: len(s.route_rank)].clone() for r, s in enumerate(schedules)]


def _check(ys: Sequence[Tensor], schedules: Sequence[Tables], direction: str) -> None:
    if not ys or any(y.dim() != 2 or y.shape[1] != ys[0].shape[-1] for y in ys):
        raise ValueError(f"ys must hold [num_rows, H] with one H on all ranks, not {[tuple(y.shape) for y in ys]}")
    if direction not in ("push", "pull"):
        raise ValueError(f"direction must be 'push' or 'pull', got {direction!r}")
    check_tables(schedules, [len(s.route_rank) for s in schedules])
    for rank, (y, s) in enumerate(zip(ys, schedules, strict=True)):
        if len(y) < int(s.segment_start[-1]):
            raise ValueError(f"ys[{rank}] has {len(y)} rows, its schedule has {int(s.segment_start[-1])}")
