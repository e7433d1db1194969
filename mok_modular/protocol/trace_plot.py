"""A picture of traces: what every worker did and when, one call of each."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mok_modular.protocol.trace import KINDS, Interval, Trace

MAX_DRAWN_TRACKS = 60
"""Tracks of a trace in a picture; of more, those of some CTAs are drawn, evenly spread."""


_COLORS = {"wait": "#d9d9d9", "publish": "#444444", "load": "#f3c98b", "store": "#8b5a2b"}


def plot(traces: Mapping[str, Trace], path: str | os.PathLike[str], call: str = "forward") -> None:
    """Draws traces one above the other, on one scale of time, each from the beginning of its first call of that kind.
    Of a GPU's many CTAs some are drawn.

    Raises ImportError with the way to mend it where matplotlib is missing, ValueError if a trace has no such call.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'mok-modular[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    whole = {name: _of_call(name, trace, call) for name, trace in traces.items()}
    chosen = {name: _drawn(traces[name], part) for name, part in whole.items()}
    stages = sorted({each.stage for part in chosen.values() for each in part if each.kind == "work"})
    palette = pyplot.get_cmap("tab20")
    colors = {stage: palette(i % 20) for i, stage in enumerate(stages)}
    heights = [len({each.track for each in part}) for part in chosen.values()]
    figure, axes = pyplot.subplots(
        len(chosen), 1, sharex=True, squeeze=False, figsize=(14, 1.5 + 0.16 * sum(heights)), height_ratios=heights
    )
    for axis, (name, part) in zip(axes[:, 0], chosen.items(), strict=True):
        start, end = min(each.begin for each in whole[name]), max(each.end for each in whole[name])
        tracks = sorted({each.track for each in part})
        for kind in KINDS:
            for stage in stages if kind == "work" else [""]:
                color = colors[stage] if kind == "work" else _COLORS[kind]
                mine = [e for e in part if e.kind == kind and e.edge != "tickets" and stage in ("", e.stage)]
                for i, track in enumerate(tracks):
                    bars = [(e.begin - start, e.end - e.begin) for e in mine if e.track == track]
                    axis.broken_barh(bars, (i - 0.45, 0.9), facecolors=color, linewidth=0)
        axis.set_title(f"{name}: {end - start} {traces[name].unit}", loc="left", fontsize=9)
        label = traces[name].worker_name if traces[name].roles else str
        axis.set_yticks(range(len(tracks)), [f"rank {r} {s} {label(w)}" for r, s, w in tracks], fontsize=5)
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel(next(iter(traces.values())).unit)
    patches = [Patch(color=colors[stage], label=stage) for stage in stages]
    labels = {"publish": "signals sent", "load": "operands loaded", "store": "stored alone"}
    drawn = {each.kind for part in chosen.values() for each in part} | {"wait", "publish"}
    patches += [Patch(color=_COLORS[kind], label=labels.get(kind, kind)) for kind in KINDS if kind in drawn - {"work"}]
    figure.legend(handles=patches, loc="upper right", ncols=6, fontsize=7)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _drawn(trace: Trace, part: list[Interval]) -> list[Interval]:
    """What of a call is drawn: all, or, of a GPU with many workers, CTAs with as many roles as any, evenly spread."""
    if not trace.roles:
        return part
    by_cta: dict[int, set[tuple[int, str, int]]] = {}
    for each in part:
        by_cta.setdefault(each.worker // len(trace.roles), set()).add(each.track)
    if sum(map(len, by_cta.values())) <= MAX_DRAWN_TRACKS:
        return part
    num_tracks = max(map(len, by_cta.values()))
    whole = sorted(cta for cta, tracks in by_cta.items() if len(tracks) == num_tracks)
    num_ctas = min(len(whole), max(1, MAX_DRAWN_TRACKS // num_tracks))
    ctas = {whole[i * len(whole) // num_ctas] for i in range(num_ctas)}
    return [each for each in part if each.worker // len(trace.roles) in ctas]


def _of_call(name: str, trace: Trace, call: str) -> list[Interval]:
    if call not in trace.calls:
        raise ValueError(f"trace {name!r} has no call {call!r}, it has {sorted(set(trace.calls))}")
    return [each for each in trace.intervals if each.call == trace.calls.index(call)]
