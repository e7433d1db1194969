"""The files in benchmarks/results/: where a figure was measured, and on which sources."""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mok_modular
from mok_modular.protocol.extension import SOURCE_SUFFIXES, hash_files
from mok_modular.testing.timing import query_gpu

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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


def write_results(group: str, payload: dict[str, Any], folder: Path | None = None, covers: Iterable[Path] = ()) -> Path:
    """Writes <group>-<YYYYMMDD-HHMM>.json to $MOK_RESULTS or benchmarks/results. `covers`: files beside csrc/ and
    mok_modular/ that the figures depend on."""
    folder = folder or Path(os.environ.get("MOK_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
    path = folder / f"{group}-{stamp}.json"
    files = sorted(path.resolve().relative_to(ROOT).as_posix() for path in covers)
    sources = {"hash": sources_hash(files), "files": files}
    path.write_text(json.dumps({"machine": describe(), "sources": sources, **payload}, indent=1) + "\n")
    return path


# ---- sources ----


def sources_hash(files: Iterable[str]) -> str:
    """The hash of csrc/, mok_modular/ and these files of the repository. Raises FileNotFoundError."""
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in SOURCE_SUFFIXES]
    return hash_files(ROOT, [*paths, *(ROOT / "mok_modular").rglob("*.py"), *(ROOT / file for file in files)])


def covered_files(module: Path) -> list[Path]:
    """A module in benchmarks/, the modules beside it that it imports, and what they list as COVERS; transitively."""
    found, todo = [], [module]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.append(path)
        if path.suffix != ".py" or path.parent != module.parent:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "COVERS" for t in node.targets
            ):
                todo += [ROOT / file for file in ast.literal_eval(node.value)]
            todo += [path.with_name(f"{name}.py") for name in names if path.with_name(f"{name}.py").is_file()]
    return found


@dataclass(frozen=True)
class RecordState:
    """A file in benchmarks/results/, when it was measured, how many bars held, and whether it is `fresh`: measured on
    the sources that are here now; `stale`, or `stale: names no sources` for a record that does not tell."""

    name: str
    date: str
    bars: str
    state: str


def state_of_record(path: Path) -> RecordState:
    record = json.loads(path.read_text())
    bars = record.get("bars", [])
    sources = record.get("sources")
    if sources is None:
        state = "stale: names no sources"
    else:
        missing = [file for file in sources["files"] if not (ROOT / file).is_file()]
        state = "fresh" if not missing and sources_hash(sources["files"]) == sources["hash"] else "stale"
    held = f"{sum(bar['ok'] for bar in bars)} of {len(bars)}" + (", quick" if record.get("quick") else "")
    return RecordState(path.name, record["machine"]["date"], held, state)


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
