"""One forward over a grid of choices: what it moves, how long it takes in logical steps, how long workers stand idle.

rows = sweep(workload, {"plan": ["fused", "split"], "workers": [2, 4]})
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mok_modular.config import MoKConfig
from mok_modular.group import LocalGroup
from mok_modular.testing import Workload, run_forward

AXES = {
    "plan": str,
    "minibatch": int,
    "macrobatch": int,
    "grain": str,
    "direction": str,
    "ring": str,
    "workers": int,
    "imbalance": float,
}
"""What can be varied. direction: pull (dispatch pulls, combine pushes) or push (the other way round); imbalance: the
share of routes that go to expert 0 instead of their own."""


def sweep(workload: Workload, axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A row a combination, in the order of the axes: their values, then `num_bytes` (moved or read by stages), `steps`
    (of the forward), `work`, `wait` and `idle` (worker steps: in tiles, at waits, and what is left of all workers'
    time), and `over_first`, steps over those of the first row.

    Raises ValueError for an axis or a value that there is not.
    """
    for name in axes:
        if name not in AXES:
            raise ValueError(f"axes are {', '.join(AXES)}; got {name!r}")
    rows: list[dict[str, Any]] = []
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        rows.append({**chosen, **_measure(workload, chosen)})
        rows[-1]["over_first"] = round(rows[-1]["steps"] / rows[0]["steps"], 3)
    return rows


def _measure(workload: Workload, chosen: Mapping[str, Any]) -> dict[str, Any]:
    direction = chosen.get("direction", "pull")
    if direction not in ("pull", "push"):
        raise ValueError(f"direction must be pull or push, got {direction!r}")
    macrobatch = chosen.get("macrobatch", 131072)
    config = MoKConfig(
        mode=chosen.get("plan", "fused"),
        minibatch_size=chosen.get("minibatch", min(4096, macrobatch)),
        macrobatch_size=macrobatch,
        signal_grain=chosen.get("grain", "row_block"),
        ring=chosen.get("ring", "interleaved"),
        dispatch=direction,
        combine="pull" if direction == "push" else "push",
        trace=True,
    )
    group = LocalGroup(workload.num_ranks, num_workers=chosen.get("workers"))
    result = run_forward(group, skewed(workload, chosen.get("imbalance", 0.0)), config)
    trace = next(iter(group.workspaces.values())).trace()
    mine = [each for each in trace.intervals if trace.calls[each.call] == "forward"]
    begin, end = min(each.begin for each in mine), max(each.end for each in mine)
    work = sum(each.end - each.begin for each in mine if each.kind != "wait")
    wait = sum(each.end - each.begin for each in mine if each.kind == "wait" and each.edge != "tickets")
    num_tracks = len({each.track for each in mine})
    return {
        "num_bytes": sum(stage.num_bytes for stage in result.stages),
        "steps": end - begin,
        "work": work,
        "wait": wait,
        "idle": num_tracks * (end - begin) - work - wait,
    }


def skewed(workload: Workload, share: float) -> Workload:
    """The same workload with a share of its routes sent to expert 0. Raises ValueError unless it is 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(f"imbalance must be 0 to 1, got {share}")
    if share == 0:
        return workload
    ids = []
    for each in workload.expert_ids:
        moved = each.clone()
        flat = moved.view(-1)
        every = max(1, round(1 / share))
        flat[::every] = flat[::every].where(flat[::every] < 0, 0)
        ids.append(moved)
    return dataclasses.replace(workload, expert_ids=ids)


def plot(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], path: str | os.PathLike[str]) -> None:
    """A bar a row: work, wait and idle of all workers. Raises ImportError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'mok-modular[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.35 * len(rows)))
    labels = [", ".join(f"{name} {row[name]}" for name in axes) for row in rows]
    left = [0] * len(rows)
    for kind, color in (("work", "#4c78a8"), ("wait", "#d9d9d9"), ("idle", "#f2f2f2")):
        axis.barh(labels, [row[kind] for row in rows], left=left, color=color, label=kind)
        left = [a + row[kind] for a, row in zip(left, rows, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("worker steps")
    axis.legend(ncols=3, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
