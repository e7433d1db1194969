"""Bars of the options' combinations on CPU ranks: a covering array of pairs, random runs, ranks that are threads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import torch
from bar import Bar

from mok_modular.testing.covering import covering_array, missing, run_array, unplain
from mok_modular.testing.fuzz import run_cases

SEED = 7
NUM_UNLIKE_RUNS = 200


def bars(quick: bool, seconds: float | None = None) -> Iterator[Bar]:
    """seconds: of the random runs."""
    torch.set_num_threads(1)
    yield from covering_bars(quick)
    seconds = seconds or (60.0 if quick else 300.0)
    num_failed = num_cases = 0
    for outcome in run_cases(SEED, deadline_s=time.perf_counter() + seconds):
        num_cases += 1
        num_failed += bool(outcome.failures)
        if outcome.failures:
            print(outcome.case.command("cpu"), *outcome.failures, sep="\n  ", file=sys.stderr, flush=True)
    yield Bar(f"random cases on CPU ranks, three plans each, in {seconds:g} s", num_cases, "at least", 10)
    yield Bar("random cases that fail", num_failed, "at most", 0)
    yield from thread_bars(20 if quick else NUM_UNLIKE_RUNS)


def covering_bars(quick: bool) -> Iterator[Bar]:
    start_s = time.process_time()
    rows = covering_array("host", 2)
    wrong = [f"--choice '{json.dumps(unplain(choice, 'host'))}': {text}" for _, choice, text in run_array(rows) if text]
    print(*wrong, sep="\n", end="", file=sys.stderr, flush=True)
    used_s = time.process_time() - start_s
    yield Bar("pairs of options that no run has", len(missing(rows, "host", 2)), "at most", 0)
    yield Bar(f"runs for every pair of options, {len(rows)}: that differ", len(wrong), "at most", 0)
    if not quick:
        yield Bar("the same, time of one core", used_s, "at most", 45, "s")


def thread_bars(num_runs: int) -> Iterator[Bar]:
    """Noisy gating under a checkpoint, and draws after a seed: what members of a LocalGroup give and processes do."""
    from cover_ranks import num_unlike_processes

    yield Bar(f"runs of {num_runs} unlike processes", num_unlike_processes(num_runs), "at most", 0)
