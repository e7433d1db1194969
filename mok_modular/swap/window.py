"""What a swapped stage works on: the rows of a rank in one generation of the ring, and checks of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mok_modular.ops import round_trip
from mok_modular.protocol.call import Call
from mok_modular.protocol.config import MoKConfig


class Memory(Protocol):
    """What swapped stages need of a workspace."""

    config: MoKConfig
    group: Any
    hidden_size: int
    topk: int

    @property
    def row_block(self) -> int: ...
    def region(self, rank: int, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Place:
    """Where a swapped function is called: on `rank` of `num_ranks`, for which `stage` of the plan and in which `call`.
    `generation` counts the launches of the stage in the call; its rows are those of `macrobatch`."""

    rank: int
    num_ranks: int
    call: str
    stage: str
    generation: int
    macrobatch: int


place: ContextVar[Place | None] = ContextVar("place", default=None)
"""Where the function that runs is called from; None outside of a call."""


class SwappedCall:
    """What the swapped stages of one collective call share."""

    def __init__(self, shared: Memory, calls: Sequence[Call], ring_rows: int) -> None:
        self.shared = shared
        self.calls = calls
        self.ring_rows = ring_rows
        # By rank and weight: the expert whose rows go on in the next generation, and its sums so far.
        self.carries: dict[tuple[int, str], tuple[int, Tensor]] = {}

    def region(self, rank: int, name: str, num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The first rows of a region."""
        return self.shared.region(rank, name, dtype)[: num_rows * width].view(num_rows, width)


@dataclass(frozen=True, eq=False)
class WindowTables:
    """The part of a schedule that belongs to one generation: what dispatch and combine read, and their reverses."""

    peer_rank: Tensor
    peer_token_idx: Tensor
    segment_start: Tensor
    segment_num_rows: Tensor
    row_block_expert: Tensor
    route_rank: Tensor
    route_row: Tensor


class Window:
    """The rows of a rank in one generation: those of one macrobatch, and how many of them are used."""

    def __init__(self, swap: SwappedCall, rank: int, generation: int) -> None:
        self.swap, self.rank, self.call = swap, rank, swap.calls[rank]
        total, ring_rows = int(self.call.schedule["counts"][0]), swap.ring_rows
        num_generations = -(-total // ring_rows)
        # Forward goes through macrobatches from last to first; what repeats them goes from first to last.
        self.macrobatch = num_generations - 1 - generation if self.call.kind == "forward" else generation
        self.first_row = self.macrobatch * ring_rows
        self.num_rows = min(ring_rows, total - self.first_row)

    def rows(self, region: str, kept: str, width: int) -> Tensor:
        """All rows of a ring region, or of the caller's tensor (the context, what a dgrad apart saves) where that keeps
        macrobatch 0."""
        tensor = self.call.tensors.get(kept)
        is_pushed = region == "ring_x" and self.swap.shared.config.dispatch == "push" and not self.call.is_backward
        if self.macrobatch == 0 and tensor is not None and tensor.numel() and not is_pushed:
            return tensor
        return self.swap.region(self.rank, region, self.swap.ring_rows, width)

    def floats(self, region: str, width: int) -> Tensor:
        """All rows of a ring region that holds float32."""
        return self.swap.region(self.rank, region, self.swap.ring_rows, width, torch.float32)

    def count(self) -> Tensor:
        """The number of rows as functions get it."""
        return torch.tensor(self.num_rows, dtype=torch.int32)

    def segments(self) -> tuple[Tensor, Tensor]:
        """segment_start and segment_num_rows, cut to the window and counted from its first row."""
        start = self.call.schedule["segment_start"].long() - self.first_row
        end = start[:-1] + self.call.schedule["segment_num_rows"]
        start, end = start.clamp(0, self.num_rows), end.clamp(0, self.num_rows)
        return start.int(), (end - start[:-1]).int()

    def tables_of_owner(self) -> list[WindowTables]:
        """Tables by rank, of which this rank's alone has rows: what a function makes rows by."""
        return [self.tables() if r == self.rank else self._no_rows(r) for r in range(len(self.swap.calls))]

    def tables_of_sources(self) -> list[WindowTables]:
        """Tables by rank that name the cells of this window's rows: what a function sends rows back by."""
        return [self._tables_of_source(r) for r in range(len(self.swap.calls))]

    def tables(self) -> WindowTables:
        schedule, window = self.call.schedule, slice(self.first_row, self.first_row + self.num_rows)
        row_block = self.swap.shared.row_block
        blocks = slice(self.first_row // row_block, (self.first_row + self.num_rows) // row_block)
        missing = torch.full_like(schedule["route_rank"], -1)
        return WindowTables(
            schedule["peer_rank"][window],
            schedule["peer_token_idx"][window],
            *self.segments(),
            schedule["row_block_expert"][blocks],
            missing,
            missing,
        )

    def _tables_of_source(self, src_rank: int) -> WindowTables:
        """Which routes of a source have a row in this window, and where: read off the rows' own table."""
        own = self.tables() if src_rank == self.rank else self._no_rows(src_rank)
        table = self.tables()
        rows = (table.peer_rank == src_rank).nonzero().squeeze(1)
        num_routes = self.swap.calls[src_rank].num_tokens * self.swap.shared.topk
        route_rank = torch.full((num_routes,), -1, dtype=torch.int32)
        route_row = torch.full((num_routes,), -1, dtype=torch.int32)
        cells = table.peer_token_idx[rows].long()
        route_rank[cells] = self.rank
        route_row[cells] = rows.int()
        return WindowTables(
            own.peer_rank,
            own.peer_token_idx,
            own.segment_start,
            own.segment_num_rows,
            own.row_block_expert,
            route_rank,
            route_row,
        )

    def _no_rows(self, rank: int) -> WindowTables:
        """Of a rank whose rows are not wanted."""
        none, num_routes = torch.zeros(0, dtype=torch.int32), self.swap.calls[rank].num_tokens * self.swap.shared.topk
        start, missing = torch.zeros(2, dtype=torch.int32), torch.full((num_routes,), -1, dtype=torch.int32)
        return WindowTables(none, none, start, start[:1], none, missing, missing)

    def store_quantized(self, name: str, to: Tensor, value: Any) -> None:
        """In MXFP8 as the stage itself leaves it: the values after quantization by row."""
        store(name, to, value, self.num_rows)
        if self.call.is_mxfp8:
            to[: self.num_rows] = round_trip(to[: self.num_rows])


def parts(values: Any, count: int, name: str, what: str) -> Sequence[Any]:
    """The `count` values that a function must return together."""
    if not isinstance(values, Sequence) or len(values) != count:
        raise ValueError(f"{name} must return {what}, {count}, got {describe(values)}")
    return values


def store(name: str, to: Tensor, value: Any, num_rows: int) -> None:
    """Copies rows that a function returned; raises ValueError unless they are of the right kind, and enough."""
    check_rows(name, value, num_rows, to.shape[1], to.dtype)
    to[:num_rows] = value[:num_rows]


def check_rows(name: str, value: Any, num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
    kind = str(dtype).removeprefix("torch.")
    if not isinstance(value, Tensor) or value.dtype != dtype or value.dim() != 2:
        raise ValueError(f"{name} must return {kind} rows, got {describe(value)}")
    if len(value) < num_rows or value.shape[1] != width:
        raise ValueError(f"{name} must return at least [{num_rows}, {width}], got {list(value.shape)}")


def describe(value: Any) -> str:
    """A value in an error."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else type(value).__name__
