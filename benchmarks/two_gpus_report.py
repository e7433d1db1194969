"""Tables and a picture of what `bars.py two_gpus` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from two_gpus_cases import LAYERS, Load, floors_ms
from two_gpus_contenders import DEEP_EP, MAX_ERROR, NCCL, OURS

from mok_modular.protocol.errors import format_table

Figures = Mapping[str, Any]
ROUTINGS = ("uniform", "captured", "remote")
TOKENS = (512, 2048, 8192)


def best_link_rate(found: Figures, routing: str, name: str, max_sms: int = 1 << 30) -> float | None:
    """GB/s on the link of a copy, at its best number of SMs; None if it was not measured."""
    rates = [
        figures["link_gb_per_s"]
        for key, figures in found.get("copies", {}).items()
        if key.startswith(f"{routing}: {name}, ") and num_sms(key) <= max_sms
    ]
    return max(rates, default=None)


def num_sms(key: str) -> int:
    return int(key.rsplit(", ", 1)[1].removesuffix(" SMs"))


def link_rate(found: Figures) -> float:
    """Bytes/s that a plain copy reaches at best, loads or stores, both directions busy; NaN if it was not measured."""
    rates = [best_link_rate(found, "remote", f"plain {name}") for name in ("loads", "stores")]
    return max((rate * 1e9 for rate in rates if rate is not None), default=math.nan)


def layer_case(found: Figures, name: str, num_tokens: int, routing: str) -> dict[str, float]:
    """Milliseconds of a case by contender (of a baseline, the better of eager and compiled; beside it `..., eager`),
    its floors (NaN without the rate of the link), and the larger of FLOP and link floor over the time of fused."""
    case = found.get(f"layer {name}", {}).get(f"T={num_tokens} {routing}")
    if case is None:
        return {"floor_over_time": math.nan}
    times: dict[str, float] = {}
    for contender, ms in case["ms"].items():
        base = contender.removesuffix(", compiled")
        times[base] = min(ms, times.get(base, math.inf))
        if base == contender:
            times[f"{base}, eager"] = ms
    load = Load(case["rows"], case["unique"])
    floors = floors_ms(LAYERS[name], load, case["dense_flops"], link_rate(found))
    floor = math.nan if math.isnan(floors["link"]) else max(floors["flop"], floors["link"])
    return {
        **times,
        **{f"{kind} floor": ms for kind, ms in floors.items()},
        "floor_over_time": floor / times.get("fused", math.nan),
    }


def errors(found: Figures) -> list[dict[str, Any]]:
    """Of every case of the layer, what each contender's output was off by, or what it raised."""
    parts = [cases for part, cases in found.items() if part.startswith("layer ")]
    return [case["errors"] for cases in parts for case in cases.values() if isinstance(case, dict)]


# ---- tables ----


def tables(found: Figures) -> str:
    parts = [layer_table(found), copy_table(found), _pairs(found, "signals"), _pairs(found, "minibatch")]
    left_out = {
        f"{contender} was left out: {error if isinstance(error, str) else f'off by {error:.3g}'}"
        for case in errors(found)
        for contender, error in case.items()
        if isinstance(error, str) or not error <= MAX_ERROR
    }
    parts += sorted(left_out)
    failed = [f"{part}: {reason}" for part, reason in found.get("failed", {}).items()]
    if failed:
        parts.append("parts that failed:\n" + "\n".join(failed))
    return "\n\n".join(part for part in parts if part)


def layer_table(found: Figures) -> str:
    """One line a case; milliseconds, and how many times as long as fused the others take."""
    contenders = [*OURS, NCCL, DEEP_EP]
    rows = []
    for name in LAYERS:
        for num_tokens in TOKENS:
            for routing in ROUTINGS:
                case = layer_case(found, name, num_tokens, routing)
                if len(case) == 1:
                    continue
                fused = case.get("fused", math.nan)
                rows.append(
                    (
                        name,
                        num_tokens,
                        routing,
                        *(_number(case.get(each)) for each in contenders),
                        *(_number(case[f"{kind} floor"]) for kind in ("flop", "link", "link_unique")),
                        _number(case["floor_over_time"]),
                        *(_number(case.get(each, math.nan) / fused) for each in ("split", NCCL, DEEP_EP)),
                    )
                )
    if not rows:
        return ""
    floors = ("FLOP floor", "link floor", "link, unique", "floor/fused")
    header = ("layer", "T", "routing", *contenders, *floors, *(f"{each}/fused" for each in ("split", "NCCL", "DeepEP")))
    return format_table(header, [tuple(map(str, row)) for row in rows])


def copy_table(found: Figures) -> str:
    rows = [
        (key, f"{each['ms']:.3f}", f"{each['link_gb_per_s']:.0f}", f"{each['logical_gb_per_s']:.0f}")
        for key, each in found.get("copies", {}).items()
    ]
    return format_table(("copy", "ms", "link GB/s", "logical GB/s"), rows) if rows else ""


def _pairs(found: Figures, part: str) -> str:
    rows = []
    for key, figures in found.get(part, {}).items():
        values = figures["ms"] if isinstance(figures.get("ms"), dict) else figures
        rows += [(part, key, name, f"{value:.3f}") for name, value in values.items()]
    return format_table(("part", "case", "what", "figure"), rows) if rows else ""


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


# ---- picture ----

COLOURS = {"fused": "#1b6ca8", "split": "#7fb3d5", NCCL: "#c0504d", DEEP_EP: "#e0a030"}


def draw(found: Figures, path: Path) -> None:
    """Layer times with their floors for three cases, link rates by SMs, minibatches. Raises ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(17, 9))
    for axis, (num_tokens, routing) in zip(
        axes.flat, ((2048, "uniform"), (2048, "remote"), (8192, "uniform")), strict=False
    ):
        _draw_layer(axis, found, num_tokens, routing)
    _draw_copies(axes[1][0], found)
    _draw_minibatches(axes[1][1], found)
    _draw_signals(axes[1][2], found)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_layer(axis: Any, found: Figures, num_tokens: int, routing: str) -> None:
    contenders = [*OURS, NCCL, DEEP_EP]
    width = 0.8 / len(contenders)
    for place, name in enumerate(LAYERS):
        case = layer_case(found, name, num_tokens, routing)
        for i, contender in enumerate(contenders):
            if contender in case:
                left = place + (i - (len(contenders) - 1) / 2) * width
                axis.bar(left, case[contender], width, color=COLOURS.get(contender, "#4c9f70"), label=contender)
        for kind, style in (("flop floor", "-"), ("link floor", ":")):
            if not math.isnan(case.get(kind, math.nan)):
                axis.hlines(case[kind], place - 0.45, place + 0.45, colors="black", linestyles=style, label=kind)
    axis.set_xticks(range(len(LAYERS)), list(LAYERS), fontsize=8)
    axis.set_ylabel("ms")
    axis.set_title(f"schedule + forward, T = {num_tokens}, {routing}")
    _legend(axis)


def _draw_copies(axis: Any, found: Figures) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for key, figures in found.get("copies", {}).items():
        if key.startswith("remote: "):
            name = key.removeprefix("remote: ").rsplit(", ", 1)[0]
            lines.setdefault(name, []).append((num_sms(key), figures["link_gb_per_s"]))
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axis.plot(xs, ys, marker="o", linestyle="--" if name.startswith("plain") else "-", label=name)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("SMs")
    axis.set_ylabel("GB/s a direction")
    axis.set_title("copies alone, every row crosses the link")
    _legend(axis)


def _draw_minibatches(axis: Any, found: Figures) -> None:
    for case, figures in found.get("minibatch", {}).items():
        for grain in ("row_block", "minibatch"):
            points = [(int(key.split()[1]), ms) for key, ms in figures["ms"].items() if key.split()[0] == grain]
            if points:
                best = min(figures["ms"].values())
                xs, ys = zip(*sorted(points), strict=True)
                axis.plot(xs, [ms / best for ms in ys], marker="o", label=f"{case}, signals per {grain}")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("minibatch, rows")
    axis.set_ylabel("time over the best")
    axis.set_title("Kimi, uniform, fused")
    _legend(axis)


def _draw_signals(axis: Any, found: Figures) -> None:
    pairs = {
        key.removeprefix("hand-over, "): figures["us"]
        for key, figures in found.get("signals", {}).items()
        if key.startswith("hand-over, ")
    }
    axis.bar(list(pairs), list(pairs.values()), color="#7fb3d5")
    axis.set_ylabel("us")
    axis.set_title("hand-over of a row of 14 KB, one way")


def _legend(axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        by_label = dict(zip(labels, handles, strict=True))
        axis.legend(by_label.values(), by_label.keys(), fontsize=7)
