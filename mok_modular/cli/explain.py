"""The protocol of one small forward, step by step: who waits for what, who works, who publishes.

The run is real: a traced forward on captured routing. `Walk` goes through its intervals in the order of logical time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mok_modular.protocol.trace import Interval, Trace

HELP = """next [N]     the next step, or the next N
run EDGE     on to the next wait for an edge, such as run x_ready
waits        who waits at this moment, and for what
edges        the edges that there are waits for
quit"""


class Walk:
    """The steps of a trace in order. A step is an interval; waits for the next task are left out."""

    def __init__(self, trace: Trace, call: str = "forward") -> None:
        chosen = [each for each in trace.intervals if trace.calls[each.call] == call and each.edge != "tickets"]
        self.steps = sorted(chosen, key=lambda each: (each.begin, each.track))
        self.position = 0

    @property
    def now(self) -> int:
        """The logical time of the step that was shown last."""
        return self.steps[self.position - 1].begin if self.position else 0

    def next(self, count: int = 1) -> list[Interval]:
        """The next steps; empty at the end."""
        shown = self.steps[self.position : self.position + count]
        self.position += len(shown)
        return shown

    def run_to(self, edge: str) -> list[Interval]:
        """On to the next wait for an edge, which is shown; empty if there is none."""
        for i in range(self.position, len(self.steps)):
            if self.steps[i].edge == edge:
                self.position = i + 1
                return [self.steps[i]]
        return []

    def waits(self) -> list[Interval]:
        """The waits that are open at this moment."""
        return [each for each in self.steps if each.kind == "wait" and each.begin <= self.now < each.end]

    def edges(self) -> list[str]:
        """What is waited for in this run."""
        return sorted({each.edge for each in self.steps if each.kind == "wait"})


def describe(step: Interval) -> str:
    """A step in a line."""
    who = (
        f"[{step.begin:5}] rank {step.rank}, {step.stream} worker {step.worker}: {step.stage} {step.block}.{step.part}"
    )
    if step.kind == "work":
        return f"{who} works for {step.end - step.begin} steps"
    if step.kind == "publish":
        return f"{who} publishes"
    whom = f" of rank {step.peer}" if step.peer >= 0 else ""
    return f"{who} waits {step.end - step.begin} steps for {step.edge}[{step.edge_index}]{whom}"


def converse(walk: Walk, commands: Iterable[str]) -> Iterator[str]:
    """Answers commands, a line each; unknown ones get the help."""
    for line in commands:
        word, _, rest = line.strip().partition(" ")
        if word in ("quit", "q"):
            return
        if word in ("next", "n", ""):
            shown = walk.next(int(rest) if rest.strip().isdecimal() else 1)
        elif word in ("run", "r"):
            shown = walk.run_to(rest.strip())
            if not shown:
                yield f"no further wait for {rest.strip()!r}; there are waits for {', '.join(walk.edges())}"
                continue
        elif word in ("waits", "w"):
            shown = walk.waits()
            if not shown:
                yield "nobody waits"
                continue
        elif word == "edges":
            yield ", ".join(walk.edges())
            continue
        else:
            yield HELP
            continue
        yield from (describe(step) for step in shown) if shown else ["the call is over"]
