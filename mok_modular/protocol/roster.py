"""The stages and edges of the protocol, asked of csrc/protocol/roster.h as compiled; it says what its columns mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from mok_modular.protocol.extension import extension

STAGES = ("dispatch", "gate_up", "swiglu", "down", "combine")
"""The fusible stages of a forward, in data-flow order. Public, and held against the roster when that is read."""

_FORWARD, _BACKWARD = ("every", "replayed", "forward", "forward_end"), ("every", "replayed", "backward", "wgrad")


@dataclass(frozen=True)
class Stage:
    """A row of MOK_STAGES."""

    name: str
    file: str
    place: str
    pass_name: str
    work: str
    lag: int
    inside: str  # "" where it is inside none

    @property
    def is_product(self) -> bool:
        """A matrix product."""
        return self.work in ("product", "wgrad")


@dataclass(frozen=True)
class Edge:
    """A row of MOK_EDGES."""

    name: str
    scope: str
    epoch: str
    cells: str
    pass_name: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def is_across_ranks(self) -> bool:
        """Words at other ranks, not counters inside one."""
        return self.scope != "rank"


@dataclass(frozen=True)
class Roster:
    """Every stage and every edge, in the order of their numbers."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]

    def stage(self, name: str) -> Stage:
        """A stage by its name. Raises KeyError where there is none."""
        return self._by_name[name]

    def edge(self, name: str) -> Edge:
        """An edge by its name. Raises KeyError where there is none."""
        return self._edge_by_name[name]

    def names(self, place: str, *passes: str) -> tuple[str, ...]:
        """The stages of a place, of some of its passes or (without `passes`) of all, in order."""
        return tuple(s.name for s in self.stages if s.place == place and (not passes or s.pass_name in passes))

    @cached_property
    def stage_names(self) -> tuple[str, ...]:
        """Of all stages, by number."""
        return tuple(stage.name for stage in self.stages)

    @cached_property
    def edge_names(self) -> tuple[str, ...]:
        """Of all edges, by number."""
        return tuple(edge.name for edge in self.edges)

    @cached_property
    def windowed(self) -> tuple[str, ...]:
        """All that work window by window through the ring. Bit i of a group mask is windowed[i]."""
        return self.names("windowed")

    @cached_property
    def replayed(self) -> tuple[str, ...]:
        """What a backward runs again for rows that the context does not hold."""
        return self.names("windowed", "replayed")

    @cached_property
    def forward(self) -> tuple[Stage, ...]:
        """The stages of a forward and of its schedule, but for what a plan does not know."""
        return tuple(stage for stage in self.stages if stage.pass_name in ("every", "replayed", "forward"))

    @cached_property
    def mirror(self) -> dict[str, str]:
        """The backward's stage by the forward's that it mirrors, last to first."""
        return dict(zip(STAGES, reversed(self.names("windowed", "backward")), strict=True))

    @cached_property
    def communicating(self) -> frozenset[str]:
        """What communication workers do."""
        return frozenset(stage.name for stage in self.stages if stage.work == "copy")

    @cached_property
    def task_order(self) -> tuple[str, ...]:
        """The stages in the order of a rank's tasks; a call has those of its pass."""
        return (*self.names("prologue"), *self.windowed, *self.names("last"))

    def has_own_tasks(self, stage: str, group: tuple[str, ...], *, is_pull_combine: bool) -> bool:
        """Whether a stage has tasks in a kernel of `group`: none where another one's tasks do it."""
        inside = self.stage(stage).inside
        return inside not in group or (stage == "combine" and is_pull_combine)

    def last_writer(self, edge: str, *, is_backward: bool) -> str:
        """The last stage in a rank's order, before the end of a call, that publishes an edge in a pass."""
        passes = _BACKWARD if is_backward else _FORWARD
        ended = self.names("last")
        writers = (s for s in self.task_order if s in self.edge(edge).writers and s not in ended)
        return [stage for stage in writers if self.stage(stage).pass_name in passes][-1]

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def _edge_by_name(self) -> dict[str, Edge]:
        return {edge.name: edge for edge in self.edges}


@cache
def roster() -> Roster:
    """The roster. Raises ImportError where the host target is not compiled."""
    rows = extension().roster()
    stages = tuple(Stage(**row) for row in rows["stages"])
    lists = ("writers", "readers")
    edges = tuple(Edge(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in rows["edges"])
    found = Roster(stages, edges)
    planned = found.names("windowed", "replayed", "forward")
    if planned != STAGES:
        raise ImportError(f"the compiled host target has other stages in a plan: {planned}, not {STAGES}")
    return found
