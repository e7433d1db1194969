"""Real runs of the real stage code under the happens-before checker: nothing is unordered, and an arrival that counts
double, so that somebody waits for one too few, is seen whatever the interleaving was.

The checked build is compiled here, once, with the calls that a thread sanitizer gets; it is no part of the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from native import build_target

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "happens_before.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def extension() -> Path:
    folder = build_target("_host_checked")
    return next((folder / "checked").glob("_host*"))


def check(extension: Path, case: str, planted: str = "", order: str = "round_robin") -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(extension), case, planted, order], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [
        "split",
        "fused",
        "dispatch+gate_up|swiglu+down|combine",
        "pull once",
        "fused pull once",
        "push",
        "fused push and pull",
    ],
)
def test_everything_is_ordered(extension: Path, case: str) -> None:
    order = "random" if case in ("push", "pull once") else "round_robin"
    found = check(extension, case, order=order)
    assert found["error"] == ""
    assert found["races"] == []
    assert found["num_accesses"] > 500_000
    assert found["num_releases"] > 500


@pytest.mark.parametrize(
    ("case", "edge", "region"),
    [
        ("split", "x_ready,rank=0,index=0", "context.x"),
        ("fused", "x_ready,rank=0,index=0", "context.x"),
        ("fused", "hidden_ready,rank=0,index=0", "ring_hidden"),
        ("fused", "slot_free,rank=0,index=1", "ring_hidden"),
        ("split", "y_ready,rank=0,index=0", "ring_y"),
        ("split", "d_y_ready,rank=0,index=0", "ring_d_y"),
        ("fused", "ids_counted,rank=1", "histogram"),
        ("fused", "published,rank=0", " x["),
        ("fused", "exited,rank=0", "combine"),
    ],
)
def test_one_arrival_too_few(extension: Path, case: str, edge: str, region: str) -> None:
    found = check(extension, case, f"corrupt:{edge},by=1")
    assert found["num_races"] > 0
    assert region in found["races"][0], found["races"][0]
    assert "and nothing orders the two" in found["races"][0]
