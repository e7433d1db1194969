"""Pictures of a sweep; they need matplotlib: pip install 'mok-modular[plot]'."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def pyplot() -> Any:
    """matplotlib without a screen. Raises ImportError with the way to mend it where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'mok-modular[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_counts(rows: Rows, axes: Sequence[str], path: str | os.PathLike[str]) -> None:
    """A bar a row of `sweep`: work, wait and idle of all workers."""
    figure, axis = pyplot().subplots(figsize=(9, 1.2 + 0.35 * len(rows)))
    labels = [_label(row, axes) for row in rows]
    left = [0] * len(rows)
    for kind, color in (("work", "#4c78a8"), ("wait", "#d9d9d9"), ("idle", "#f2f2f2")):
        axis.barh(labels, [row[kind] for row in rows], left=left, color=color, label=kind)
        left = [a + row[kind] for a, row in zip(left, rows, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("worker steps")
    axis.legend(ncols=3, fontsize=8)
    _save(figure, path)


def plot_times(rows: Rows, axes: Sequence[str], path: str | os.PathLike[str], title: str) -> None:
    """Rows of `time_points`: over the number of tokens where there are several, otherwise a bar a row."""
    if len({row.get("tokens") for row in rows}) > 1:
        _plot_over_tokens(rows, axes, path, title)
        return
    figure, axis = pyplot().subplots(figsize=(9, 1.6 + 0.35 * len(rows)))
    places = range(len(rows))
    axis.barh(places, [row["with_schedule_ms"] for row in rows], color="#d9d9d9", label="schedule + forward")
    axis.barh(places, [row["forward_ms"] for row in rows], color="#4c78a8", height=0.5, label="forward")
    floors = [row["floor_ms"] for row in rows]
    axis.scatter(floors, places, marker="|", s=160, color="black", label="floor: FLOPs at the dense product's rate")
    axis.set_yticks(places, [_label(row, axes) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("median ms")
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=8, loc="left")
    _save(figure, path)


def _plot_over_tokens(rows: Rows, axes: Sequence[str], path: str | os.PathLike[str], title: str) -> None:
    """Two panels, a line for each combination of the other axes."""
    others = [name for name in axes if name != "tokens"]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        lines.setdefault(_label(row, others) or "forward", []).append(row)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 4.8))
    for name, line in lines.items():
        tokens = [row["tokens"] for row in line]
        left.plot(tokens, [row["forward_ms"] for row in line], marker=".", label=name)
        right.plot(tokens, [row["floor_over_time"] for row in line], marker=".", label=name)
    floor = {row["tokens"]: row["floor_ms"] for row in rows}
    left.plot(sorted(floor), [floor[each] for each in sorted(floor)], color="black", linestyle=":", label="floor")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of a rank")
        axis.grid(alpha=0.3)
    left.set_yscale("log")
    left.set_ylabel("forward, median ms")
    right.set_ylabel("floor / time")
    right.set_ylim(bottom=0)
    left.legend(fontsize=7)
    figure.suptitle(title, fontsize=8, x=0.02, ha="left")
    _save(figure, path)


def _label(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in axes)


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
