"""The tables of a schedule as other stages read them: what they hold, the check, and the kernel's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mok_modular.targets import stage_arguments


class Tables(Protocol):
    """What dispatch and combine read of a schedule: a ScheduleTables or a MoKSchedule."""

    @property
    def peer_rank(self) -> Tensor: ...
    @property
    def peer_token_idx(self) -> Tensor: ...
    @property
    def segment_start(self) -> Tensor: ...
    @property
    def segment_num_rows(self) -> Tensor: ...
    @property
    def row_block_expert(self) -> Tensor: ...
    @property
    def route_rank(self) -> Tensor: ...
    @property
    def route_row(self) -> Tensor: ...


def check_tables(schedules: Sequence[Tables], num_routes: Sequence[int]) -> None:
    """Raises ValueError unless every rank's tables fit together and with each rank's number of routes T*K: whatever
    follows them then stays inside the rows and cells of all ranks."""
    num_ranks = len(num_routes)
    if len(schedules) != num_ranks:
        raise ValueError(f"schedules must have one entry per rank, {num_ranks}, got {len(schedules)}")
    num_rows = torch.tensor([int(s.segment_start[-1]) for s in schedules])
    limit = torch.tensor(num_routes)
    for rank, s in enumerate(schedules):
        where = f"schedules[{rank}]"
        if s.peer_rank.shape != s.peer_token_idx.shape or len(s.peer_rank) < num_rows[rank]:
            raise ValueError(
                f"{where}: peer_rank and peer_token_idx must both have at least {num_rows[rank]} rows, got "
                f"{list(s.peer_rank.shape)} and {list(s.peer_token_idx.shape)}"
            )
        if s.route_rank.shape != (num_routes[rank],) or s.route_row.shape != (num_routes[rank],):
            raise ValueError(
                f"{where}: route_rank and route_row must be [T*K] = [{num_routes[rank]}], got "
                f"{list(s.route_rank.shape)} and {list(s.route_row.shape)}"
            )
        starts, counts = s.segment_start.tolist(), s.segment_num_rows.tolist()
        is_filled = torch.zeros(len(s.peer_rank), dtype=torch.bool)
        for start, count in zip(starts, counts, strict=False):
            is_filled[start : start + count] = True
        if not torch.equal(is_filled, s.peer_rank.cpu() >= 0):
            raise ValueError(f"{where}: peer_rank must be -1 in padding and past the last segment, and only there")
        _check_targets(f"{where}: peer_rank and peer_token_idx", s.peer_rank, s.peer_token_idx, "routes", limit)
        _check_targets(f"{where}: route_rank and route_row", s.route_rank, s.route_row, "rows", num_rows)


def check_segments(num_experts: int, segment_start: Tensor, segment_num_rows: Tensor, num_rows: int) -> None:
    """Raises ValueError unless these are the segments of so many experts, one after the other, within so many rows."""
    if segment_start.shape != (num_experts + 1,) or segment_num_rows.shape != (num_experts,):
        raise ValueError(
            f"with {num_experts} experts segment_start must be [{num_experts + 1}] and segment_num_rows "
            f"[{num_experts}], not {tuple(segment_start.shape)} and {tuple(segment_num_rows.shape)}"
        )
    room = segment_start.diff()
    is_fitting = bool(((segment_num_rows >= 0) & (segment_num_rows <= room)).all())
    if not is_fitting or int(segment_start[0]) != 0 or int(segment_start[-1]) > num_rows:
        raise ValueError(
            f"segments must start at 0, follow one another and end within {num_rows} rows; segment_start is "
            f"{segment_start.tolist()}, segment_num_rows {segment_num_rows.tolist()}"
        )


def _check_targets(name: str, rank: Tensor, idx: Tensor, what: str, limit: Tensor) -> None:
    rank, idx = rank.cpu().long(), idx.cpu().long()
    routed = rank >= 0
    rank, idx = rank[routed], idx[routed]
    if bool((rank >= len(limit)).any()) or bool(((idx < 0) | (idx >= limit[rank.clamp(max=len(limit) - 1)])).any()):
        raise ValueError(f"{name} name {what} beyond those of the ranks, {limit.tolist()}")


def kernel_tables(schedules: Sequence[Tables]) -> tuple[list[dict[str, Tensor]], int]:
    """The tables as a kernel takes them, by rank, and their row block (128 if no rank has a row)."""
    row_block = next((len(s.peer_rank) // len(s.row_block_expert) for s in schedules if len(s.row_block_expert)), 128)
    by_rank = []
    for s in schedules:
        tables = stage_arguments.segment_tables(s.segment_start, s.segment_num_rows, row_block)
        for name in ("peer_rank", "peer_token_idx", "route_rank", "route_row"):
            tables[name] = getattr(s, name).cpu().to(torch.int32).contiguous()
        # The order in which a pusher sends: by owner and row there.
        route_rank, route_row = tables["route_rank"], tables["route_row"]
        routes = (route_rank >= 0).nonzero().squeeze(1)
        key = route_rank[routes].long() * 2**32 + route_row[routes].long()
        tables["sorted_route"] = routes[key.argsort()].to(torch.int32)
        tables["counts"][2] = len(routes)
        by_rank.append(tables)
    return by_rank, row_block
