"""Bars of two GPUs over NVLink: dispatch and combine against a plain copy by loads and stores. More is to come."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bar import Bar

figures: dict[str, Any] = {}
"""GB/s a direction on the link, both directions at once, by direction and number of SMs."""


def bars() -> Iterator[Bar]:
    if torch.cuda.device_count() < 2:
        raise SystemExit("two_gpus needs two GPUs of compute capability 9.0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.json"
        script = Path(__file__).with_name("two_gpus.py")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        subprocess.run([*launcher, str(script), str(path)], check=True, timeout=300)
        figures.update(json.loads(path.read_text()))
    for stage, plain in (("pull dispatch", "plain loads"), ("push combine", "plain stores")):
        rate, reference = (max(figures[f"{name} {num}"] for num in (4, 8, 16)) for name in (stage, plain))
        yield Bar(f"{stage} over NVLink with at most 16 SMs / {plain}", rate / reference, "at least", 0.95)
