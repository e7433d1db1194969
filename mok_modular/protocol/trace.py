"""What every worker did and when: intervals of waiting, work and publishing, as JSON for a viewer and as a picture.

    config = MoKConfig(trace=True)
    ... build_schedule, forward ...
    workspace.trace().save("forward.json")      # opens in ui.perfetto.dev or chrome://tracing
    trace_plot.plot({"split": a, "fused": b}, "both.png")  # needs matplotlib: pip install 'mok-modular[plot]'

A track is one worker of one stream of one rank. Its intervals never overlap. Time is in nanoseconds on threads and in
logical steps on fibers: as if all workers ran side by side, a task takes a step per KiB that it moves or per 2^18
floating-point operations, whichever is more; its publish takes one. Steps are the same on every machine.

On a GPU time is in nanoseconds of its global timer. A worker is a CTA, or a role of one: in kernels with matrix
products the scheduler (waits for what a task needs), the producer (loads), the consumers (work, from a tile's first
operands to its last product), the publisher (signals) and the communicators (copies). A CTA serves all ranks of its GPU
in turn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

KINDS = ("wait", "work", "publish", "load", "store")
"""`load` and `store` are of a GPU's matrix products: operands on their way, and stores that no products hide."""
MAX_RECORDS = 4_000_000
"""What a workspace keeps; later records are dropped and counted."""


class Interval(NamedTuple):
    """One interval of a worker. `edge`, `edge_index`, `peer` (-1: inside the rank) say what a wait is for; edge
    `tickets` is the wait for the next task. `is_closed` is False for a wait that was given up."""

    kind: str
    begin: int
    end: int
    call: int
    rank: int
    kernel: str
    launch: int
    stream: str
    worker: int
    stage: str
    block: int
    part: int
    edge: str
    edge_index: int
    peer: int
    is_closed: bool

    @property
    def track(self) -> tuple[int, str, int]:
        """Where the interval is drawn: rank, stream, worker."""
        return self.rank, self.stream, self.worker

    @property
    def name(self) -> str:
        """What a viewer writes on it."""
        if self.kind == "wait":
            return "next task" if self.edge == "tickets" else f"wait {self.edge}[{self.edge_index}]"
        if self.kind == "publish":
            return f"publish {self.stage}"
        task = f"{self.stage} {self.block}.{self.part}"
        return task if self.kind == "work" else f"{self.kind} {task}"


@dataclass
class Trace:
    """The intervals of the calls of one workspace, all ranks. `unit`: `ns` or `steps`; `num_dropped`: records for which
    there was no room; `calls`: the kind of each call; `roles`: on a GPU the names of a CTA's workers, whose numbers are
    `CTA * len(roles) + role`."""

    unit: str
    intervals: list[Interval] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    num_dropped: int = 0
    end: int = 0
    roles: tuple[str, ...] = ()

    def add(
        self,
        call: str,
        launches: Sequence[tuple[str, str]],
        result: Mapping[str, Any],
        stages: Sequence[str],
        edges: Sequence[str],
    ) -> None:
        """Adds the records of a call, as the target hands them out; `launches` are (kernel, stream) by number."""
        call_idx = len(self.calls)
        self.calls.append(call)
        self.num_dropped += result["num_dropped"]
        self.end = max(self.end, result["trace_end"])
        data = bytearray(result["trace"])
        if not data:
            return
        longs = torch.frombuffer(data, dtype=torch.int64).view(-1, 8)[:, :3].tolist()
        ints = torch.frombuffer(data, dtype=torch.int32).view(-1, 16)[:, 6:].tolist()
        room = max(0, MAX_RECORDS - len(self.intervals))
        self.num_dropped += max(0, len(longs) - room)
        for (begin, end, index), words in zip(longs[:room], ints[:room], strict=True):
            rank, worker, launch, kind, stage, block, part, edge, peer, is_closed = words
            kernel, stream = launches[launch]
            self.intervals.append(
                Interval(
                    KINDS[kind],
                    begin,
                    end,
                    call_idx,
                    rank,
                    kernel,
                    launch,
                    stream,
                    worker,
                    stages[stage],
                    block,
                    part,
                    edges[edge] if edge >= 0 else "",
                    index,
                    peer,
                    bool(is_closed),
                )
            )

    def tracks(self) -> dict[tuple[int, str, int], list[Interval]]:
        """Intervals in order of time, by track."""
        found: dict[tuple[int, str, int], list[Interval]] = {}
        for interval in sorted(self.intervals, key=lambda each: (each.track, each.begin)):
            found.setdefault(interval.track, []).append(interval)
        return found

    def role(self, worker: int) -> str:
        """The role of a GPU's worker in its CTA, "" on CPU ranks."""
        return self.roles[worker % len(self.roles)] if self.roles else ""

    def worker_name(self, worker: int) -> str:
        """`worker 3`, or on a GPU `CTA 17` or `CTA 17 / consumers`."""
        if not self.roles:
            return f"worker {worker}"
        cta, role = divmod(worker, len(self.roles))
        return f"CTA {cta}" if role == 0 else f"CTA {cta} / {self.roles[role]}"

    def overlaps(self) -> list[tuple[Interval, Interval]]:
        """Pairs of neighbours on a track of which the second begins before the first ends: none, or a bug."""
        return [(a, b) for track in self.tracks().values() for a, b in pairwise(track) if b.begin < a.end]

    def coverage(self) -> dict[tuple[int, int, int, int], float]:
        """What share of a worker's span, from its first interval to its last, its intervals cover: by (call, rank,
        launch, worker). A GPU's worker serves several ranks: there the rank of the key is -1."""
        spans: dict[tuple[int, int, int, int], list[Interval]] = {}
        for each in self.intervals:
            rank = -1 if self.roles else each.rank
            spans.setdefault((each.call, rank, each.launch, each.worker), []).append(each)
        return {
            key: sum(each.end - each.begin for each in span)
            / (max(each.end for each in span) - min(each.begin for each in span))
            for key, span in spans.items()
        }

    def totals(self) -> dict[str, dict[str, int]]:
        """Time by stage and kind, summed over workers; the wait for the next task is kind `idle`."""
        out: dict[str, dict[str, int]] = {}
        for each in self.intervals:
            kind = "idle" if each.edge == "tickets" else each.kind
            row = out.setdefault(each.stage, dict.fromkeys((*KINDS, "idle"), 0))
            row[kind] += each.end - each.begin
        return out

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format: complete events, a process a rank, a thread a track. A logical step is
        drawn as a microsecond."""
        scale = 1e-3 if self.unit == "ns" else 1.0
        start = min((each.begin for each in self.intervals), default=0)
        tracks = {track: tid for tid, track in enumerate(self.tracks())}
        events: list[dict[str, Any]] = []
        for rank in sorted({rank for rank, _, _ in tracks}):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for (rank, stream, worker), tid in tracks.items():
            name = {"name": f"{stream} {self.worker_name(worker)}"}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": name})
        for each in self.intervals:
            args: dict[str, Any] = {"call": self.calls[each.call], "kernel": each.kernel, "stage": each.stage}
            args |= {"task": f"{each.block}.{each.part}"}
            if each.kind == "wait":
                args |= {"edge": each.edge, "index": each.edge_index, "peer": each.peer, "is_closed": each.is_closed}
            events.append(
                {
                    "ph": "X",
                    "name": each.name,
                    "cat": each.kind,
                    "pid": each.rank,
                    "tid": tracks[each.track],
                    "ts": (each.begin - start) * scale,
                    "dur": (each.end - each.begin) * scale,
                    "args": args,
                }
            )
        other = {"unit": self.unit, "num_dropped": self.num_dropped, "calls": self.calls}
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_chrome` as JSON."""
        Path(path).write_text(json.dumps(self.to_chrome()))
