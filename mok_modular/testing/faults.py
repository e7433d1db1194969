"""Faults planted in a run of the host target, to see what a user would then get to see.

    with faults.plant(faults.drop("x_ready", rank=1), faults.stop(rank=0, after=3)):
        layer(x, expert_ids, router_weights)     # raises MoKDeadlockError that names the signal and the rank

or by name, as on the command line (`mok-modular run --fault TEXT`): `kind:name,key=value,...`

    drop:x_ready,rank=1,index=2        a signal is lost on its way
    delay:input_ready,rank=0,by=50     it comes later: by steps of the scheduler on fibers, by seconds on threads
    duplicate:hidden_ready,rank=1      it comes twice
    corrupt:x_ready,rank=1,by=-1       one arrival counts one less (or `by` more) than it should
    stop:rank=1,after=3                the rank draws three more tasks, then none
    stall:swiglu,rank=0,by=50          tasks of the stage begin later; without `by`, never

Lost, stopped and stalled: MoKDeadlockError (on threads MoKTimeoutError) that names stage, rank, edge, have, want and
who should have published it. An arrival too many: MoKSignalError. Delays, and words across ranks that are set twice,
change nothing. The workspace works again after `reset()`. A fault is planted in every call of this process until the
block ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from mok_modular.protocol.roster import roster
from mok_modular.targets.shared_workspace import planted_faults

KINDS = ("drop", "delay", "duplicate", "corrupt", "stop", "stall")
_FIELDS = {
    "drop": {"rank", "dst", "index"},
    "delay": {"rank", "dst", "index", "by"},
    "duplicate": {"rank", "dst", "index"},
    "corrupt": {"rank", "index", "by"},
    "stop": {"rank", "after"},
    "stall": {"rank", "index", "by"},
}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank. `edge` and `index` (-1: any) for signals, with `dst_rank` (-1: any) across ranks; `stage`
    and `index` (a row block) for a stall; `amount` and `after` as in the module's list.

    Raises ValueError that names what does not fit.
    """

    kind: str
    rank: int
    edge: str | None = None
    stage: str | None = None
    index: int = -1
    dst_rank: int = -1
    after: int = 0
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.rank < 0:
            raise ValueError(f"rank of a fault must be at least 0, got {self.rank}")
        edges, stages = roster().edge_names, roster().stage_names
        if self.kind == "stall" and self.stage not in stages:
            raise ValueError(f"stall needs a stage, one of {', '.join(stages)}; got {self.stage!r}")
        if self.kind not in ("stop", "stall") and self.edge not in edges:
            raise ValueError(f"{self.kind} needs an edge, one of {', '.join(edges)}; got {self.edge!r}")
        if self.kind == "corrupt" and self.edge and roster().edge(self.edge).is_across_ranks:
            raise ValueError(f"corrupt needs an edge that counts arrivals; {self.edge} is a word that one rank sets")
        if self.kind == "corrupt" and (self.amount == 0 or self.amount != int(self.amount)):
            raise ValueError(f"corrupt needs by=N, what is added to the count, got {self.amount:g}")
        if (self.kind in ("delay", "stall") and self.amount < 0) or (self.kind == "delay" and self.amount == 0):
            raise ValueError(f"{self.kind} needs by=N above 0, got {self.amount:g}")

    def __str__(self) -> str:
        name = {"stop": ""}.get(self.kind, self.edge or self.stage or "")
        fields = {"rank": self.rank, "dst": self.dst_rank, "index": self.index, "after": self.after, "by": self.amount}
        unset = {"dst": -1, "index": -1, "after": 0, "by": 0.0}
        given = [f"{key}={value:g}" for key, value in fields.items() if value != unset.get(key)]
        return f"{self.kind}:{','.join([name, *given] if name else given)}"


def drop(edge: str, rank: int, dst_rank: int = -1, index: int = -1) -> Fault:
    """The signal is lost on its way."""
    return Fault("drop", rank, edge=edge, dst_rank=dst_rank, index=index)


def delay(edge: str, rank: int, by: float, dst_rank: int = -1, index: int = -1) -> Fault:
    """The signal comes `by` steps (fibers) or seconds (threads) later."""
    return Fault("delay", rank, edge=edge, dst_rank=dst_rank, index=index, amount=by)


def duplicate(edge: str, rank: int, index: int = -1) -> Fault:
    """The signal comes twice."""
    return Fault("duplicate", rank, edge=edge, index=index)


def corrupt(edge: str, rank: int, by: int, index: int = -1) -> Fault:
    """The first arrival counts `by` more than it should."""
    return Fault("corrupt", rank, edge=edge, index=index, amount=by)


def stop(rank: int, after: int = 0) -> Fault:
    """The rank draws `after` more tasks, then none, in every call."""
    return Fault("stop", rank, after=after)


def stall(stage: str, rank: int, by: float = 0.0, index: int = -1) -> Fault:
    """Tasks of the stage begin `by` steps or seconds later; 0: never."""
    return Fault("stall", rank, stage=stage, index=index, amount=by)


def parse(text: str) -> Fault:
    """Reads the form of the command line. Raises ValueError that says what is wrong."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        raise ValueError(f"a fault is KIND:NAME,KEY=VALUE,... with KIND one of {', '.join(KINDS)}; got {text!r}")
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    names = [part for part in parts if "=" not in part]
    if len(names) != (0 if kind == "stop" else 1):
        raise ValueError(f"fault {text!r}: {kind} takes {'no name' if kind == 'stop' else 'one name'}, got {names}")
    values: dict[str, float] = {}
    for part in parts:
        key, is_pair, value = part.partition("=")
        if not is_pair:
            continue
        if key not in _FIELDS[kind]:
            raise ValueError(f"fault {text!r}: {kind} takes {', '.join(sorted(_FIELDS[kind]))}, got {key!r}")
        try:
            values[key] = float(value) if key == "by" else int(value)
        except ValueError:
            raise ValueError(f"fault {text!r}: {key} must be a number, got {value!r}") from None
    if "rank" not in values:
        raise ValueError(f"fault {text!r}: rank=N is missing")
    name = names[0] if names else None
    return Fault(
        kind,
        int(values["rank"]),
        edge=None if kind == "stall" else name,
        stage=name if kind == "stall" else None,
        index=int(values.get("index", -1)),
        dst_rank=int(values.get("dst", -1)),
        after=int(values.get("after", 0)),
        amount=values.get("by", 0.0),
    )


@contextmanager
def plant(*given: Fault | str) -> Iterator[None]:
    """Plants faults in every call of the host target until the block ends; text is parsed."""
    planted = [parse(fault) if isinstance(fault, str) else fault for fault in given]
    rows: list[dict[str, Any]] = [
        {key: value for key, value in asdict(fault).items() if value is not None} for fault in planted
    ]
    planted_faults.extend(rows)
    try:
        yield
    finally:
        for row in rows:
            planted_faults.remove(row)
