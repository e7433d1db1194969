"""Dispatch: the owner of an expert reads the tokens routed to it from the ranks that hold them."""

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
def reference(xs: Sequence[Tensor], schedules: Sequence[Tables], *, topk: int, direction: str = "pull") -> list[Tensor]:
    """Returns the rows [num_rows_r, H] of every owner, in the dtype of ``xs``.

    ``xs`` holds every rank's tokens [T_r, H], ``schedules`` every rank's tables, from either form of the schedule
    stage. Row i of an owner is token ``peer_token_idx[i] // topk`` of rank ``peer_rank[i]``; a padding row
    (peer_rank -1) is zero. ``direction`` says who moves a row, its owner (``pull``) or its source (``push``);
    the result is the same. Differentiable: a token's gradient is the sum over its rows, for bfloat16 in float32
    and rounded once; padding rows give none.

    Raises ValueError for wrong shapes, another direction and for a table entry that names no token or row.
    """
    _check(xs, schedules, topk, direction)
    num_tokens = torch.tensor([len(x) for x in xs], device=xs[0].device)
    first_token = num_tokens.cumsum(0) - num_tokens
    tokens = torch.cat(list(xs))
    if tokens.dtype == torch.bfloat16:
        tokens = tokens.float()  # so that backward sums in float32
    out = []
    for s in schedules:
        num_rows = int(s.segment_start[-1])
        filled = (s.peer_rank >= 0).nonzero().squeeze(1)
        token = s.peer_token_idx[filled].long() // topk
        rows = tokens.index_select(0, first_token[s.peer_rank[filled].long()] + token).to(xs[0].dtype)
        out.append(rows.new_zeros(num_rows, rows.shape[1]).index_copy(0, filled, rows))
    return out


def launch(
    xs: Sequence[Tensor],
    schedules: Sequence[Tables],
    *,
    topk: int,
    direction: str = "pull",
    group: LocalGroup | None = None,
) -> list[Tensor]:
    """``reference`` by the compiled stage, on the ranks of ``group`` (a fresh LocalGroup if None). ``xs`` are bfloat16
    on the CPU or a GPU, where the kernel then runs; no gradients. A pusher leaves padding rows alone, so for ``push``
    they are zeros beforehand.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device.
    """
    device = stage_arguments.check_devices(xs=xs, schedules=schedules)
    _check(xs, schedules, topk, direction)
    stage_arguments.check_bfloat16(**{f"xs[{rank}]": x for rank, x in enumerate(xs)})
    tables, row_block = kernel_tables(schedules)
    hidden_size = xs[0].shape[1]
    run = stage_run.open_run(
        "dispatch",
        tables,
        row_block=row_block,
        num_tokens=[len(x) for x in xs],
        topk=topk,
        hidden_size=hidden_size,
        is_push_dispatch=direction == "push",
        device=device,
        group=group,
    )
    rings = [run.region(rank, "ring_x", hidden_size)[: int(s.segment_start[-1])] for rank, s in enumerate(schedules)]
    if direction == "pull":
        for rank, x in enumerate(xs):
            run.fill(rank, "x", x)
        run.launch()
    else:
        for ring, s in zip(rings, schedules, strict=True):
            ring[s.peer_rank[: len(ring)] < 0] = 0
        run.launch([{"x": x.detach().contiguous()} for x in xs])
    return [ring.clone() for ring in rings]


def _check(xs: Sequence[Tensor], schedules: Sequence[Tables], topk: int, direction: str) -> None:
    if not xs or any(x.dim() != 2 or x.shape[1] != xs[0].shape[-1] for x in xs):
        raise ValueError(f"xs must hold [T, H] with one H on all ranks, not {[tuple(x.shape) for x in xs]}")
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    if direction not in ("pull", "push"):
        raise ValueError(f"direction must be 'pull' or 'push', got {direction!r}")
    check_tables(schedules, [len(x) * topk for x in xs])
