"""Reverse dispatch: the gradients of the inputs return to the routes of their tokens, and d_router with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.protocol.sizes import NUM_COLUMNS
from mok_modular.stages import combine
from mok_modular.stages.tables import Tables, check_tables, kernel_tables
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(
    d_xs: Sequence[Tensor], router_partials: Sequence[Tensor], schedules: Sequence[Tables]
) -> list[tuple[Tensor, Tensor]]:
    """Returns what arrives at every source rank, a pair a rank: d_x of its routes [T_r*K, H], in the dtype of ``d_xs``,
    and the gradients of their router weights [T_r*K], in that of ``router_partials``.

    ``d_xs`` holds every owner's rows [num_rows_r, H], ``router_partials`` their d_router by groups of columns
    [num_rows_r, I/32] float32 (see swiglu_backward), ``schedules`` every rank's tables, from either form of the
    schedule stage. Cell ``token*K + k`` is row ``route_row`` of rank ``route_rank``, copied; its d_router is the sum of
    the row's groups in float32, in ascending order from zero. Cells of missing routes (route_rank -1) are zeros here;
    the library leaves them unwritten, and reduce makes zeros of them. It is the transpose of dispatch without its sum
    over a token's routes, which is reduce's.

    Raises TypeError for other dtypes, ValueError for wrong shapes and for a table entry that names no row or cell.
    """
    _check(d_xs, router_partials, schedules)
    sums = []
    for partials in router_partials:
        total = partials.new_zeros(len(partials))
        for group in range(partials.shape[1]):
            total = total + partials[:, group]
        sums.append(total[:, None])
    cells = combine.reference(d_xs, schedules)
    return [(d_x, d_router[:, 0]) for d_x, d_router in zip(cells, combine.reference(sums, schedules), strict=True)]


def launch(
    d_xs: Sequence[Tensor],
    router_partials: Sequence[Tensor],
    schedules: Sequence[Tables],
    *,
    group: LocalGroup | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """``reference`` by the compiled stage, on the ranks of ``group`` (a fresh LocalGroup if None). ``d_xs`` are
    bfloat16
    and ``router_partials`` float32 on the CPU; no gradients. The kernel leaves the cells of missing routes alone, so
    they are zeros beforehand.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device.
    """
    device = stage_arguments.check_devices(d_xs=d_xs, router_partials=router_partials, schedules=schedules)
    _check(d_xs, router_partials, schedules)
    stage_arguments.check_bfloat16(**{f"d_xs[{rank}]": d_x for rank, d_x in enumerate(d_xs)})
    for rank, partials in enumerate(router_partials):
        stage_arguments.check_float32(f"router_partials[{rank}]", partials)
    tables, row_block = kernel_tables(schedules)
    hidden_size, num_groups = d_xs[0].shape[1], router_partials[0].shape[1]
    run = stage_run.open_run(
        "reverse_dispatch",
        tables,
        row_block=row_block,
        num_tokens=[len(s.route_rank) for s in schedules],  # a cell a route: as if K were 1
        hidden_size=hidden_size,
        intermediate_size=num_groups * NUM_COLUMNS,
        kind="backward",
        device=device,
        group=group,
    )
    for rank, (d_x, partials, s) in enumerate(zip(d_xs, router_partials, schedules, strict=True)):
        num_rows, is_missing = int(s.segment_start[-1]), s.route_rank < 0
        run.fill(rank, "ring_y", d_x[:num_rows])
        run.floats(rank, "router_partials")[: num_rows * num_groups] = partials[:num_rows].detach().flatten()
        run.region(rank, "combine", hidden_size)[: len(is_missing)][is_missing] = 0
        run.floats(rank, "d_router")[: len(is_missing)][is_missing] = 0
    run.launch()
    out = []
    for rank, s in enumerate(schedules):
        d_x = run.region(rank, "combine", hidden_size)[: len(s.route_rank)].clone()
        out.append((d_x, run.floats(rank, "d_router")[: len(s.route_rank)].clone()))
    return out


def _check(d_xs: Sequence[Tensor], router_partials: Sequence[Tensor], schedules: Sequence[Tables]) -> None:
    if not d_xs or any(d_x.dim() != 2 or d_x.shape[1] != d_xs[0].shape[-1] for d_x in d_xs):
        shapes = [tuple(d_x.shape) for d_x in d_xs]
        raise ValueError(f"d_xs must hold [num_rows, H] with one H on all ranks, not {shapes}")
    wanted = [len(d_x) for d_x in d_xs]
    widths = {partials.shape[-1] for partials in router_partials}
    if [len(p) for p in router_partials] != wanted or any(p.dim() != 2 for p in router_partials) or len(widths) != 1:
        shapes = [tuple(partials.shape) for partials in router_partials]
        raise ValueError(f"router_partials must hold [num_rows, I/32] with num_rows = {wanted}, not {shapes}")
    if any(partials.dtype not in (torch.float32, torch.float64) for partials in router_partials):
        raise TypeError(f"router_partials must be torch.float32, not {[p.dtype for p in router_partials]}")
    check_tables(schedules, [len(s.route_rank) for s in schedules])
    for rank, (d_x, s) in enumerate(zip(d_xs, schedules, strict=True)):
        if len(d_x) < int(s.segment_start[-1]):
            raise ValueError(f"d_xs[{rank}] has {len(d_x)} rows, its schedule has {int(s.segment_start[-1])}")
