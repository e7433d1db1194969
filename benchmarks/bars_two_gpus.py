"""Bars of two GPUs over NVLink: the layer against its floors, NCCL and DeepEP; dispatch and combine against copies.

    MOK_TWO_GPUS_PARTS=copies,layer,minibatch,signals   parts, or the beginnings of their names; all without it, with
                                                        --quick the copies and one layer
    MOK_TWO_GPUS_SECONDS=420                            when to stop; what is there then is reported

The parts run in processes of their own (two_gpus.py), which are started again behind a part that failed. Every figure
is in two_gpus.partial.json beside the results as soon as it is measured.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
import torch
import two_gpus_report as report
from bar import Bar
from two_gpus_cases import LAYERS, NUM_RANKS
from two_gpus_contenders import DEEP_EP, NCCL

PARTS = ("copies", *(f"layer {name}" for name in LAYERS), "minibatch", "copies hot", "signals")
QUICK_PARTS = "copies,layer kimi"
COVERS = ("benchmarks/two_gpus.py", "benchmarks/peer_copy.cu", "benchmarks/signal_rounds.cu")
STALL_S = 120.0
"""A part that has nothing new to say for so long is given up."""
FLOOR_BARS = {"uniform": {"qwen3.5-397b": 0.70, "": 0.75}, "remote": {"": 0.70}}
NCCL_BARS = {"kimi-k2.7": 2.2, "glm-5.2": 2.2, "qwen3.5-397b": 3.5, "deepseek-v4-pro": 1.8}
DEEP_EP_BARS = {"kimi-k2.7": 1.7, "glm-5.2": 1.7, "qwen3.5-397b": 2.4, "deepseek-v4-pro": 1.5}
figures: dict[str, Any] = {}
"""Everything measured, by part (two_gpus.py)."""


def bars(quick: bool) -> Iterator[Bar]:
    if torch.cuda.device_count() < 2:
        raise SystemExit("two_gpus needs two GPUs of compute capability 9.0")
    parts = chosen_parts(os.environ.get("MOK_TWO_GPUS_PARTS", QUICK_PARTS if quick else ""))
    folder = Path(os.environ.get("MOK_RESULTS", machine.RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "two_gpus.partial.json"
    path.unlink(missing_ok=True)
    figures.update(measure(path, parts, float(os.environ.get("MOK_TWO_GPUS_SECONDS", "420"))))
    yield from bars_of(figures, parts)


def finish(path: Path) -> str:
    """The tables as text; the picture goes beside the results at `path`."""
    path.with_name("two_gpus.partial.json").unlink(missing_ok=True)
    text = report.tables(figures)
    try:
        report.draw(figures, path.with_suffix(".png"))
    except ImportError as error:
        text += f"\nno picture: {error}"
    return text


def chosen_parts(names: str) -> list[str]:
    """The parts that the comma-separated beginnings name, all for an empty string."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if not any(part.startswith(name) for part in PARTS)]
    if unknown:
        raise SystemExit(f"MOK_TWO_GPUS_PARTS: no part begins with {unknown[0]!r}; parts: {', '.join(PARTS)}")
    return [part for part in PARTS if not wanted or any(part.startswith(name) for name in wanted)]


# ---- the processes ----


def start_ranks(path: Path, parts: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """The processes of all ranks, as torchrun would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_gpus.py")
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(path), *parts],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=sys.stderr,
        )
        for rank in range(NUM_RANKS)
    ]


def measure(path: Path, parts: Sequence[str], limit_s: float, stall_s: float = STALL_S) -> dict[str, Any]:
    """Runs the parts and returns the report, with what went wrong by part in `failed`."""
    remaining, failed = list(parts), {}
    end_s = time.monotonic() + limit_s
    while remaining and time.monotonic() < end_s:
        reason = _watch(start_ranks(path, remaining), path, end_s, stall_s)
        done = _read(path).get("done", [])
        missing = [part for part in remaining if part not in done]
        if missing:
            failed[missing[0]] = reason
        remaining = missing[1:]
    failed |= dict.fromkeys(remaining, "no time was left")
    return {**_read(path), "failed": failed}


def _watch(ranks: Sequence[subprocess.Popen[bytes]], path: Path, end_s: float, stall_s: float) -> str:
    """Waits for the end of all ranks, or ends them; says why."""
    changed_s, seen = time.monotonic(), None
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            if any(codes) or None not in codes:
                return f"exit codes {codes}"
            time.sleep(0.1)
            stamp = path.stat().st_mtime_ns if path.exists() else None
            if stamp != seen:
                changed_s, seen = time.monotonic(), stamp
            if time.monotonic() > end_s:
                return "stopped: no time was left"
            if time.monotonic() - changed_s > stall_s:
                return f"stopped: nothing came for {stall_s:.0f} s"
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
        for rank in ranks:
            rank.wait()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


# ---- the bars ----


def bars_of(found: dict[str, Any], parts: Sequence[str]) -> Iterator[Bar]:
    """The bars of these parts; NaN where a figure is missing."""
    if "copies" in parts:
        yield from copy_bars(found)
    for name in LAYERS:
        if f"layer {name}" in parts:
            yield from layer_bars(found, name)
    if "copies hot" in parts:
        pull, push = (report.best_link_rate(found, "hot", f"{way} dispatch") for way in ("pull", "push"))
        yield Bar("one hot rank, dispatch: link use of pull / of push", ratio(pull, push), "at least", 1.0)


def copy_bars(found: dict[str, Any]) -> Iterator[Bar]:
    for stage, plain in (("pull dispatch", "plain loads"), ("push combine", "plain stores")):
        rate, reference = (report.best_link_rate(found, "remote", name, max_sms=16) for name in (stage, plain))
        title = f"{stage} over NVLink with at most 16 SMs / {plain}"
        yield Bar(title, ratio(rate, reference), "at least", 0.95)


def layer_bars(found: dict[str, Any], name: str) -> Iterator[Bar]:
    cases = {routing: report.layer_case(found, name, 2048, routing) for routing in ("uniform", "remote")}
    for routing, case in cases.items():
        bar = FLOOR_BARS[routing].get(name, FLOOR_BARS[routing][""])
        title = f"fused forward {name} T=2048 {routing}, floor (FLOPs or link, per route) / time"
        yield Bar(title, case["floor_over_time"], "at least", bar)
    has_deep_ep = any(DEEP_EP in errors for errors in report.errors(found))
    for routing, other, bar in (
        ("uniform", NCCL, NCCL_BARS[name]),
        *((routing, DEEP_EP, DEEP_EP_BARS[name]) for routing in cases if has_deep_ep),
    ):
        for kind, key in (("eager", f"{other}, eager"), ("the better of eager and compiled", other)):
            title = f"fused forward {name} T=2048 {routing}, {other} ({kind}) time / time"
            yield Bar(title, ratio(cases[routing].get(key), cases[routing].get("fused")), "at least", bar)
    title = f"fused forward {name} T=2048 uniform, split time / time"
    yield Bar(title, ratio(cases["uniform"].get("split"), cases["uniform"].get("fused")), "at least", 1.15)


def ratio(value: float | None, reference: float | None) -> float:
    return value / reference if value is not None and reference else math.nan
