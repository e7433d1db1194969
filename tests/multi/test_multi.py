"""Ranks that are processes: tests/multi/run.py under torchrun, as people start it, on the GPUs of this machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.py")
NUM_CASES = SCRIPT.read_text().count("\ndef case_")
TIMEOUT_S = 170


def why_not() -> str:
    """Why this machine cannot run the tests, "" if it can."""
    if not torch.cuda.is_available():
        return "they need a GPU of compute capability 9.0, and torch sees none"
    if torch.cuda.get_device_capability() != (9, 0):
        return "they need a GPU of compute capability 9.0"
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py-cu13 is not installed"
    return ""


pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run"), pytest.mark.timeout(TIMEOUT_S + 10)]


@pytest.mark.parametrize("signals", ["direct", "nvshmem"])
@pytest.mark.parametrize("num_ranks", sorted({1, 4, torch.cuda.device_count() or 1}))
def test_layer_under_torchrun(num_ranks: int, signals: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_ranks}",
        "--standalone",
        str(SCRIPT),
    ]
    done = subprocess.run(
        [*command, "--bodies", signals], timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.count(f"({signals}) on {num_ranks} ranks") == NUM_CASES, done.stdout


def test_groups_smaller_than_the_world() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]
    command = [*launcher, str(SCRIPT), "--group-size", "2", "--bodies", "direct", "--repeats", "20"]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert done.stdout.count("(direct) on 2 ranks") == NUM_CASES, done.stdout


def test_killed_process_is_named_and_the_others_end() -> None:
    """Without torchrun, which would end the others itself: a rank is killed by SIGKILL."""
    num_ranks = 2 * torch.cuda.device_count()  # NVSHMEM wants as many on every GPU
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--cases", "killed", "--bodies", "direct"],
            env={**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * (num_ranks - 1) + [-9], f"{codes}\n" + "\n".join(output[-4000:] for output in outputs)
    assert "ok killed" in outputs[0]
