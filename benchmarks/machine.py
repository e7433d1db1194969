"""Where a figure was measured, for the files in benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import mok_modular
from mok_modular.testing.timing import query_gpu

RESULTS = Path(__file__).resolve().parent / "results"


def describe() -> dict[str, Any]:
    """Machine, driver, versions, date and commit ($MOK_COMMIT where there is no git)."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "num_gpus": torch.cuda.device_count(),
        "driver": query_gpu("driver_version")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "mok_modular": mok_modular.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "commit": os.environ.get("MOK_COMMIT") or _run("git", "rev-parse", "--short=12", "HEAD"),
    }


def clocks() -> dict[str, str]:
    """What the GPU runs at just now."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    return {name: value for name, value in zip(fields, query_gpu(*fields), strict=True) if value is not None}


def write_results(group: str, payload: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes <group>-<YYYYMMDD-HHMM>.json to $MOK_RESULTS or benchmarks/results."""
    folder = folder or Path(os.environ.get("MOK_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
    path = folder / f"{group}-{stamp}.json"
    path.write_text(json.dumps({"machine": describe(), **payload}, indent=1) + "\n")
    return path


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
