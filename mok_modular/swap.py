"""Stages swapped for functions of the caller's: `MoKConfig(stages={"swiglu": f})`.

A function is called as `mok_modular.stages.<name>.reference` is, once per generation of the ring on each rank:

    dispatch(xs, tables, topk=K)                      -> rows of every rank; those of this one are taken
    grouped_gemm(rows, (w_gate, w_up), start, count)  -> gate, up; with one weight the down projection
    swiglu(gate, up, limit, num_rows=n)               -> h; rows from n on are not used
    combine(ys, tables)                               -> cells of every rank; those of this rank's rows are taken
    reduce(combined, router_weights, mask, shared)    -> output, once a call

Rows are those of the ring in one generation: sizes do not depend on the routing, the number of rows is in a tensor
(`num_rows`, or the last of `segment_start`). What lies behind it, and padding where a stage may not read it, can hold
anything. Waits and signals of the stage are done around the function. In an MXFP8 layer the library quantizes what
dispatch and swiglu return, so a function is the same in both precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mok_modular.plan import Plan
    from mok_modular.targets.host import Call, SharedWorkspace

STAGES_OF = {
    "dispatch": ("dispatch",),
    "grouped_gemm": ("gate_up", "down"),
    "swiglu": ("swiglu",),
    "combine": ("combine",),
    "reduce": ("reduce",),
}
"""Which stages of a plan a swapped function stands in for; reduce always stands alone."""

_NAME_OF = {stage: name for name, stages in STAGES_OF.items() for stage in stages}


def check_stages(stages: Any, plan: Plan, *, is_push_dispatch: bool, is_pull_combine: bool) -> None:
    """Raises TypeError or ValueError unless every entry is a function for a stage that stands alone in its kernel."""
    if not isinstance(stages, Mapping):
        raise TypeError(f"stages must be a dict of functions by stage, got {type(stages).__name__}")
    for name, function in stages.items():
        if name not in STAGES_OF:
            raise ValueError(f"stages can be {', '.join(STAGES_OF)}; got {name!r}")
        if not callable(function):
            raise TypeError(f"stages[{name!r}] must be a function, got {type(function).__name__}")
        for stage in STAGES_OF[name]:
            if stage != "reduce" and (stage,) not in plan.groups:
                group = next("+".join(group) for group in plan.groups if stage in group)
                raise ValueError(
                    f"stages[{name!r}]: {stage} must stand alone in its kernel, in mode {str(plan)!r} it is in {group}"
                )
    if "dispatch" in stages and is_push_dispatch:
        raise ValueError("stages['dispatch'] stands in for a pull dispatch, got dispatch='push'")
    if "combine" in stages and is_pull_combine:
        raise ValueError("stages['combine'] stands in for a push combine, got combine='pull'")


@dataclass(frozen=True, eq=False)
class WindowTables:
    """The part of a schedule that belongs to one generation: what dispatch and combine read."""

    peer_rank: Tensor
    peer_token_idx: Tensor
    segment_start: Tensor
    segment_num_rows: Tensor
    row_block_expert: Tensor
    route_rank: Tensor
    route_row: Tensor


class Swap:
    """The swapped stages of one collective call, and what went wrong in them, by rank."""

    def __init__(self, shared: SharedWorkspace, calls: Sequence[Call], ring_rows: int) -> None:
        self.shared = shared
        self.calls = calls
        self.ring_rows = ring_rows
        self.errors: dict[int, Exception] = {}

    def function(self, rank: int, stages: Sequence[str], generation: int | None) -> Callable[[], bool] | None:
        """What does the work of a launch; None: the library's own kernel."""
        call = self.calls[rank]
        name = _NAME_OF.get(stages[0]) if len(stages) == 1 else None
        if name not in call.config.stages or (name == "reduce" and call.kind != "forward"):
            return None
        assert name is not None
        work: Callable[..., None] = getattr(self, f"_{stages[0]}")
        function = call.config.stages[name]

        def run() -> bool:
            try:
                with torch.no_grad():
                    if name == "reduce":
                        work(rank, function)
                    else:
                        assert generation is not None
                        work(rank, function, _Window(self, rank, generation))
            except Exception as error:  # raised again on its own rank when all have stopped
                error.add_note(f"in stages[{name!r}] on rank {rank}")
                self.errors[rank] = error
                return False
            return True

        return run

    def region(self, rank: int, name: str, num_rows: int, width: int) -> Tensor:
        return self.shared.region(rank, name, torch.bfloat16)[: num_rows * width].view(num_rows, width)

    def _dispatch(self, rank: int, function: Callable[..., Any], window: _Window) -> None:
        width = self.shared.hidden_size
        xs = [
            call.tensors["x"] if call.config.wire == "mxfp8" else self.region(r, "x", call.num_tokens, width)
            for r, call in enumerate(self.calls)
        ]
        tables = [window.tables() if r == rank else self._no_rows(r) for r in range(len(self.calls))]
        rows = function(xs, tables, topk=self.shared.topk)
        out = _one_of(rows, len(self.calls), rank, "dispatch")
        self._store_quantized("dispatch", rank, window.rows("ring_x", "context_x", width), out, window.num_rows)

    def _gate_up(self, rank: int, function: Callable[..., Any], window: _Window) -> None:
        call = self.calls[rank]
        weights = (call.tensors["w_routed_gate"], call.tensors["w_routed_up"])
        x = window.rows("ring_x", "context_x", self.shared.hidden_size)
        out = function(x, weights, *window.segments())
        if not isinstance(out, Sequence) or len(out) != 2:
            raise ValueError(f"grouped_gemm must return (gate, up) for two weights, got {_describe(out)}")
        for plane, rows in zip(("gate", "up"), out, strict=True):
            to = window.rows(f"ring_{plane}", f"context_{plane}", call.intermediate_size)
            _store("grouped_gemm", to, rows, window.num_rows)

    def _swiglu(self, rank: int, function: Callable[..., Any], window: _Window) -> None:
        call = self.calls[rank]
        gate, up = (window.rows(f"ring_{p}", f"context_{p}", call.intermediate_size) for p in ("gate", "up"))
        out = function(gate, up, call.swiglu_limit, num_rows=torch.tensor(window.num_rows, dtype=torch.int32))
        hidden = window.rows("ring_hidden", "", call.intermediate_size)
        self._store_quantized("swiglu", rank, hidden, out, window.num_rows)

    def _down(self, rank: int, function: Callable[..., Any], window: _Window) -> None:
        call = self.calls[rank]
        hidden = window.rows("ring_hidden", "", call.intermediate_size)
        out = function(hidden, call.tensors["w_routed_down"], *window.segments())
        _store("grouped_gemm", window.rows("ring_y", "", self.shared.hidden_size), out, window.num_rows)

    def _combine(self, rank: int, function: Callable[..., Any], window: _Window) -> None:
        width = self.shared.hidden_size
        own = window.rows("ring_y", "", width)
        ys = [own if r == rank else own[:0] for r in range(len(self.calls))]
        tables = [window.tables_of_source(r) for r in range(len(self.calls))]
        out = function(ys, tables)
        for src, table in enumerate(tables):
            cells = _one_of(out, len(self.calls), src, "combine")
            to = self.region(src, "combine", len(table.route_rank), width)
            _check_rows("combine", cells, len(to), width)
            routed = table.route_rank >= 0
            to[routed] = cells[: len(to)][routed]

    def _reduce(self, rank: int, function: Callable[..., Any]) -> None:
        call, width = self.calls[rank], self.shared.hidden_size
        combined = self.region(rank, "combine", call.num_tokens * self.shared.topk, width)
        shared = self.region(rank, "shared_y", call.num_tokens, width) if call.shared_size else None
        mask = (call.schedule["route_rank"] >= 0).view(call.num_tokens, self.shared.topk)
        out = function(combined, call.tensors["router_weights"], mask, shared)
        _store("reduce", call.tensors["output"], out, call.num_tokens)

    def _store_quantized(self, name: str, rank: int, to: Tensor, value: Any, num_rows: int) -> None:
        """In MXFP8 as the stage itself leaves it: the values after quantization by row."""
        from mok_modular.stages.quantize import round_trip

        _store(name, to, value, num_rows)
        if self.calls[rank].is_mxfp8:
            to[:num_rows] = round_trip(to[:num_rows])

    def _no_rows(self, rank: int) -> WindowTables:
        """Of a rank whose rows are not wanted."""
        none, num_routes = torch.zeros(0, dtype=torch.int32), self.calls[rank].num_tokens * self.shared.topk
        start, missing = torch.zeros(2, dtype=torch.int32), torch.full((num_routes,), -1, dtype=torch.int32)
        return WindowTables(none, none, start, start[:1], none, missing, missing)


class _Window:
    """The rows of a rank in one generation: those of one macrobatch, and how many of them are used."""

    def __init__(self, swap: Swap, rank: int, generation: int) -> None:
        self.swap, self.rank, self.call = swap, rank, swap.calls[rank]
        total, ring_rows = int(self.call.schedule["counts"][0]), swap.ring_rows
        num_generations = -(-total // ring_rows)
        # Forward goes through macrobatches from last to first; what repeats them goes from first to last.
        self.macrobatch = num_generations - 1 - generation if self.call.kind == "forward" else generation
        self.first_row = self.macrobatch * ring_rows
        self.num_rows = min(ring_rows, total - self.first_row)

    def rows(self, region: str, context: str, width: int) -> Tensor:
        """All rows of a ring region, or of the context where macrobatch 0 is kept there."""
        kept = self.call.tensors.get(context)
        is_pushed = region == "ring_x" and self.swap.shared.config.dispatch == "push"
        if self.macrobatch == 0 and kept is not None and kept.numel() and not is_pushed:
            return kept
        return self.swap.region(self.rank, region, self.swap.ring_rows, width)

    def segments(self) -> tuple[Tensor, Tensor]:
        """segment_start and segment_num_rows, cut to the window and counted from its first row."""
        start = self.call.schedule["segment_start"].long() - self.first_row
        end = start[:-1] + self.call.schedule["segment_num_rows"]
        start, end = start.clamp(0, self.num_rows), end.clamp(0, self.num_rows)
        return start.int(), (end - start[:-1]).int()

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

    def tables_of_source(self, src_rank: int) -> WindowTables:
        """Which routes of a source have a row in this window, and where: read off the rows' own table."""
        own = self.tables() if src_rank == self.rank else self.swap._no_rows(src_rank)
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


def _one_of(values: Any, count: int, index: int, name: str) -> Any:
    if not isinstance(values, Sequence) or len(values) != count:
        raise ValueError(f"{name} must return one tensor per rank, {count}, got {_describe(values)}")
    return values[index]


def _store(name: str, to: Tensor, value: Any, num_rows: int) -> None:
    _check_rows(name, value, num_rows, to.shape[1])
    to[:num_rows] = value[:num_rows]


def _check_rows(name: str, value: Any, num_rows: int, width: int) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bfloat16 or value.dim() != 2:
        raise ValueError(f"{name} must return bfloat16 rows, got {_describe(value)}")
    if len(value) < num_rows or value.shape[1] != width:
        raise ValueError(f"{name} must return at least [{num_rows}, {width}], got {list(value.shape)}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else type(value).__name__
