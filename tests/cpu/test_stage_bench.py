"""benchmarks/stage_bench.py without a GPU: the figures that a benchmark leaves, from a layer that is made up."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STAGES = ("schedule", "dispatch", "gate_up", "swiglu", "down", "combine", "reduce")


class MadeUp:
    """A layer whose kernels take 2 ms, the first time 50 ms."""

    def __init__(self, *_: Any) -> None:
        self.num_calls = 0
        self.workspace = SimpleNamespace(check=lambda: None)

    def schedule(self, ids: Tensor) -> Tensor:
        return ids

    def schedule_ms(self, _: Tensor) -> dict[str, float]:
        self.num_calls += 1
        return {"schedule": 50.0 if self.num_calls == 1 else 2.0}

    def kernel_ms(self, _: Tensor) -> dict[str, float]:
        self.num_calls += 1
        return dict.fromkeys(STAGES[1:], 50.0 if self.num_calls == 1 else 2.0)


@pytest.fixture
def stage_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("stage_bench")
    monkeypatch.setattr(module, "Layer", MadeUp)
    monkeypatch.setattr(module, "random_ids", lambda *sizes: torch.zeros(1))
    monkeypatch.setattr(module, "found_rows", [])
    monkeypatch.setattr(module.machine, "describe", dict)
    monkeypatch.setattr(module.machine, "clocks", dict)
    return module


@pytest.mark.parametrize("stage", STAGES)
def test_figures(stage_bench: Any, benchmark: Any, stage: str) -> None:
    stage_bench.bench(benchmark, stage, "kimi-k2.7", 2048)
    info = benchmark.extra_info
    assert info["kernel_ms"] == 2.0
    rows, hidden, inter = 2048 * 8, 7168, 2048
    flops = {"gate_up": 4 * rows * hidden * inter, "down": 2 * rows * hidden * inter, "reduce": 2 * rows * hidden}
    assert info["teraflops"] == pytest.approx(flops.get(stage, 0) / 2e-3 / 1e12)
    assert 0 < info["gigabytes_per_s"] < 10_000
    if stage == "combine":
        assert info["gigabytes_per_s"] == pytest.approx(2 * 2 * rows * hidden / 2e-3 / 1e9)
    assert [row[:4] for row in stage_bench.found_rows] == [(stage, "kimi-k2.7", 2048, 2.0)]


def test_the_table_at_the_end(stage_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_conftest", BENCHMARKS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    said: list[str] = []
    reporter = SimpleNamespace(section=said.append, write_line=said.append)
    conftest.pytest_terminal_summary(reporter)
    assert said == []
    stage_bench.found_rows += [("down", "kimi-k2.7", 2048, 2.0, 1234.5, 240.5), ("combine", "x", 1, 0.5, 3.0, 0.0)]
    monkeypatch.setitem(sys.modules, "stage_bench", stage_bench)
    conftest.pytest_terminal_summary(reporter)
    assert said[1].splitlines()[1].split() == ["down", "kimi-k2.7", "2048", "2.0000", "1234", "240.5"]
    assert said[1].splitlines()[2].split()[-1] == "-"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("bench_*.py")), ids=lambda path: path.stem)
def test_every_benchmark_names_a_kernel(stage_bench: Any, path: Path) -> None:
    module = importlib.import_module(path.stem)
    (test,) = [getattr(module, name) for name in vars(module) if name.startswith("test_")]
    called: list[str] = []
    module.bench = lambda benchmark, kernel, *sizes: called.append(kernel)
    products = ("gate_up", "down") if path.stem == "bench_grouped_gemm" else ()
    for options in [{"product": each} for each in products] or [{}]:
        test(None, "kimi-k2.7", 2048, **options)
    assert set(called) <= set(STAGES)
    assert called
