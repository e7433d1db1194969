"""The thread executor under ThreadSanitizer: a plain C++ program, since an interpreter's threads would drown it."""

from __future__ import annotations

import subprocess

import pytest
from native import build_target


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_report() -> None:
    """20 seeds, 4 ranks, schedules, forwards and backwards, one kernel a stage and one for all."""
    program = build_target("mok_threads") / "mok_threads"
    done = subprocess.run([str(program), "20", "4"], capture_output=True, text=True, timeout=600)
    assert "ThreadSanitizer" not in done.stdout + done.stderr, (done.stdout + done.stderr)[:4000]
    assert done.returncode == 0
    assert done.stdout.count(": ok") == 20
