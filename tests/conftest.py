"""Same values on every run: seeds, one torch thread, and hypothesis without a database or a clock. What was left out is
said in the end."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every triple of options on CPU ranks, not only every pair")


LEFT_OUT = pytest.StashKey[int]()
"""Slow tests that were collected and not chosen."""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT] += item.get_closest_marker("slow") is not None


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How to have what did not run."""
    if num_left_out := config.stash[LEFT_OUT]:
        terminalreporter.write_line(
            f"left out: {num_left_out} slow tests, most of which need a compiler, NVRTC or matplotlib: "
            "pip install '.[dev]' && pytest -m slow"
        )
    num_by_reason: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple):
            num_by_reason[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, num_skipped in num_by_reason.most_common():
        terminalreporter.write_line(f"skipped: {num_skipped} tests: {reason}")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
