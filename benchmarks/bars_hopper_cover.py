"""Bars of the options' combinations on one Hopper GPU: a covering array of triples, and random runs by three plans.

python benchmarks/bars.py hopper_cover --seconds 500
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bar import Bar

from mok_modular.protocol.errors import format_table
from mok_modular.testing.covering import covering_array, missing, run_array, unplain
from mok_modular.testing.fuzz import run_cases
from mok_modular.testing.kernels import all_kernels, compile_kernels
from mok_modular.testing.options import Choice

DEVICE = "cuda:0"
SEED = 7
NUM_CASES = 2000
RECORD = "fuzz"
"""What the files in benchmarks/results/ are called."""
figures: dict[str, Any] = {}
"""Numbers of runs and cases, seconds, the largest errors, and every failure with what repeats it."""


def bars(quick: bool, seconds: float | None = None) -> Iterator[Bar]:
    """seconds: of the whole group, kernels included; random cases end with it. quick: pairs, and 100 cases."""
    if not torch.cuda.is_available():
        raise SystemExit("hopper_cover needs a GPU of compute capability 9.0")
    torch.set_num_threads(1)
    deadline_s = time.perf_counter() + (seconds or 530.0)
    rows = prepare(2 if quick else 3)
    yield from covering_bars(rows, 2 if quick else 3, deadline_s)
    yield from fuzz_bars(100 if quick else NUM_CASES, deadline_s)


def prepare(strength: int) -> list[Choice]:
    """The array, made while other processes compile the kernels that it and the random cases need."""
    start_s = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_kernels, [*all_kernels(), *all_kernels(is_traced=True)])
        rows = covering_array("sm_90a", strength)
        figures["array_s"] = time.perf_counter() - start_s
        compiling.result()
    figures["prepare_s"] = time.perf_counter() - start_s
    _say(f"{len(rows)} runs, prepared in {figures['prepare_s']:.1f} s")
    return rows


def covering_bars(rows: list[Choice], strength: int, deadline_s: float) -> Iterator[Bar]:
    start_s = time.perf_counter()
    num_run, wrong = 0, []
    for number, choice, text in run_array(rows, DEVICE, deadline_s=deadline_s):
        num_run += 1
        if text:
            wrong.append({"run": number, "choice": unplain(choice, "sm_90a"), "what": text})
            _say(f"run {number}: {text}\n  --choice '{json.dumps(wrong[-1]['choice'])}'")
        if num_run % 100 == 0:
            _say(f"{num_run} of {len(rows)} runs, {len(wrong)} wrong, {time.perf_counter() - start_s:.1f} s")
    figures["covering"] = {
        "strength": strength,
        "runs": num_run,
        "seconds": time.perf_counter() - start_s,
        "wrong": wrong,
    }
    name = {2: "pair", 3: "triple"}[strength]
    yield Bar(f"{name}s of options that no run has", len(missing(rows[:num_run], "sm_90a", strength)), "at most", 0)
    yield Bar(f"runs for every {name} of options, {num_run}: that differ", len(wrong), "at most", 0)


def fuzz_bars(num_cases: int, deadline_s: float) -> Iterator[Bar]:
    start_s = time.perf_counter()
    num_run, failed, worst = 0, [], {}
    for outcome in run_cases(SEED, DEVICE, num_cases=num_cases, deadline_s=deadline_s):
        num_run += 1
        for name, check in outcome.checks.items():
            worst[name] = max(worst.get(name, 0.0), check.ratio)
        if outcome.failures:
            failed.append({**outcome.case.to_json(), "failures": outcome.failures})
            _say("\n  ".join((outcome.case.command(DEVICE), *outcome.failures)))
        if num_run % 100 == 0:
            _say(f"{num_run} cases, {len(failed)} failed, {time.perf_counter() - start_s:.1f} s")
    figures["fuzz"] = {
        "seed": SEED,
        "cases": num_run,
        "plans": 3,
        "seconds": time.perf_counter() - start_s,
        "worst_ratio": worst,
        "failures": failed,
    }
    yield Bar("random cases, three plans each", num_run, "at least", num_cases)
    yield Bar("random cases that fail", len(failed), "at most", 0)


def finish(path: Path) -> str:
    """The figures as a table."""
    covering, fuzz = figures["covering"], figures["fuzz"]
    cells = [
        ("prepared", "", f"{figures['prepare_s']:.1f}", "", ""),
        ("covering array", covering["runs"], f"{covering['seconds']:.1f}", len(covering["wrong"]), ""),
        (
            "random cases",
            fuzz["cases"],
            f"{fuzz['seconds']:.1f}",
            len(fuzz["failures"]),
            ", ".join(f"{name} {ratio:.2f}" for name, ratio in fuzz["worst_ratio"].items()),
        ),
    ]
    return format_table(("what", "runs", "seconds", "wrong", "largest error over torch's"), cells)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
