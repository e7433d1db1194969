"""What went wrong in a call: the wait that others follow from, and how the calls of ranks differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mok_modular.protocol.call import Call
from mok_modular.protocol.roster import roster


def is_mismatch_hidden(calls: Sequence[Call]) -> bool:
    """Two ranks make different calls, and their fingerprints are the same by chance: no wait would see it."""
    first: dict[tuple[str, int], Call] = {}
    return any(call.agree != first.setdefault((call.kind, call.fingerprint()), call).agree for call in calls)


def find_culprit(
    waits: Sequence[Mapping[str, Any]], ring_blocks: int = 1 << 30, is_backward: bool = False
) -> Mapping[str, Any] | None:
    """The wait that nobody is on the way to end; the others follow from it. None if there are no waits.

    A task waits only for tasks before it in its rank's order (by generations of `ring_blocks` row blocks, then by
    stages) or for other ranks. So the first wait of a rank in that order is the one to look at, unless it is for
    a rank that itself waits before it could publish the edge.
    """

    def place(wait: Mapping[str, Any]) -> tuple[float, int]:
        if wait["stage"] == "schedule":
            return 0, roster().edge_names.index(wait["edge"])  # the order in which a schedule waits
        generation: float = wait["block"] // ring_blocks  # macrobatches ascend in a backward, else descend
        if not is_backward:
            generation = -generation
        if wait["stage"] not in roster().windowed:
            generation = math.inf if wait["stage"] == "reduce" else -math.inf
        return generation, roster().task_order.index(wait["stage"])

    is_id_missing = any(wait["stage"] == "schedule" and wait["peer"] >= 0 for wait in waits)

    def is_root(wait: Mapping[str, Any]) -> bool:
        if wait["stage"] == "schedule" and wait["peer"] < 0 and is_id_missing:
            return False  # everything else in a schedule comes behind the ids of all ranks
        if wait["peer"] < 0:
            return not any(other["rank"] == wait["rank"] and place(other) < place(wait) for other in waits)
        if wait["stage"] == "schedule":
            return True
        last_writer = roster().last_writer(wait["edge"], is_backward=is_backward)
        before = roster().task_order[: roster().task_order.index(last_writer) + 1]
        return not any(
            other["rank"] == wait["peer"] and other is not wait and other["stage"] in before for other in waits
        )

    return next((wait for wait in waits if is_root(wait)), waits[0] if waits else None)


def culprit(waits: Sequence[Mapping[str, Any]], ring_blocks: int = 1 << 30, is_backward: bool = False) -> str:
    """`find_culprit` in words."""
    wait = find_culprit(waits, ring_blocks, is_backward)
    if wait is None:
        return "no wait is on record"
    at = wait["peer"] if wait["peer"] >= 0 else wait["rank"]
    return (
        f"nobody will publish {wait['edge']}[{wait['index']}]: rank {wait['rank']}, {wait['stage']} task "
        f"{wait['task']}, waits for rank {at}, has {wait['have']} and wants {wait['want']}"
    )


def describe_mismatch(calls: Sequence[Call]) -> str:
    kinds = {rank: call.kind for rank, call in enumerate(calls)}
    if len(set(kinds.values())) > 1:
        names = {"schedule": "build_schedule"}
        given = ", ".join(f"rank {rank}: {names.get(kind, kind)}" for rank, kind in kinds.items())
        return (
            f"ranks make different calls at the same time ({given}); every rank makes the same calls in the same order"
        )
    differing = [
        f"{name} ({', '.join(f'rank {rank}: {call.agree.get(name)}' for rank, call in enumerate(calls))})"
        for name in calls[0].agree
        if any(call.agree.get(name) != calls[0].agree[name] for call in calls)
    ]
    if not differing:
        return f"{calls[0].kind}: ranks are not at the same call: an earlier one has not ended on every rank"
    return f"{calls[0].kind}: ranks differ in {'; '.join(differing)}; these must be the same on every rank"
