"""mok_modular.testing.capture: which call is kept, whatever else runs, and what becomes of an older file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, assert_same, make_workload, run, run_both

from mok_modular import MoKConfig, stages
from mok_modular.swap.window import WindowTables
from mok_modular.testing import Workload
from mok_modular.testing.capture import capture, replay


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140, 90], E=6, K=3)


def load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([WindowTables]):
        return torch.load(path, weights_only=True)


def config_of(name: str, path: Path, **which: int) -> MoKConfig:
    return MoKConfig(mode="split", **SMALL_RING, stages={name: capture(name, path, **which)})


def test_the_file_says_which_call_it_holds(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "gemm.pt"
    run_both(workload, config_of("grouped_gemm", path, rank=1, generation=1))
    place = {"rank": 1, "num_ranks": 3, "call": "forward", "stage": "gate_up", "generation": 1, "macrobatch": 0}
    assert load(path)["place"] == place
    assert replay("grouped_gemm", path)["place"] == place
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["swiglu", "grouped_gemm", "wgrad", "reduce"])
def test_the_same_call_in_every_order_and_on_threads(name: str, workload: Workload, tmp_path: Path) -> None:
    found = []
    for i, group in enumerate(
        ({}, {"order": "last_first"}, {"order": "random", "seed": 5}, *[{"executor": "threads"}] * 4)
    ):
        path = tmp_path / f"{i}.pt"
        run_both(workload, config_of(name, path, rank=2), **group)
        found.append(load(path))
    first = found[0]["args"]
    for each in found:
        assert each["place"] == found[0]["place"]
        for a, b in zip(first, each["args"], strict=True):
            if isinstance(a, torch.Tensor) and a.dtype == torch.int32:
                assert torch.equal(a, b)  # the numbers of rows: those of the same rank and generation
    assert found[0]["place"]["rank"] == 2


def test_a_second_run_replaces_the_file(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "swiglu.pt"
    run(workload, config_of("swiglu", path))
    first = load(path)["args"][0]
    run(make_workload([60, 50], E=4), config_of("swiglu", path))
    second = load(path)
    assert second["place"]["num_ranks"] == 2
    assert second["args"][0].shape != first.shape or not torch.equal(second["args"][0], first)
    capture("swiglu", path)
    assert not path.exists()  # until its run


def test_only_the_first_call_is_kept(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "swiglu.pt"
    config = config_of("swiglu", path)
    run(workload, config)
    first = load(path)["args"]
    run(make_workload([60, 50], E=4), config)
    assert torch.equal(load(path)["args"][0].nan_to_num(), first[0].nan_to_num())


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    tensors = tmp_path / "tensors.pt"
    torch.save({"x": torch.zeros(2)}, tensors)
    for path in (other, tensors, tmp_path):
        with pytest.raises(FileExistsError, match="exists and holds no captured stage"):
            capture("swiglu", path)
    assert other.read_text() == "mine"
    with pytest.raises(FileNotFoundError, match="missing is no folder"):
        capture("swiglu", tmp_path / "missing" / "swiglu.pt")
    with pytest.raises(ValueError, match="rank must be at least 0, got -1"):
        capture("swiglu", tmp_path / "swiglu.pt", rank=-1)
    with pytest.raises(TypeError, match="generation must be an int"):
        capture("swiglu", tmp_path / "swiglu.pt", generation=None)  # type: ignore[arg-type]


def test_a_capture_changes_nothing(workload: Workload, tmp_path: Path) -> None:
    """It is the reference, with its name, also outside of a call."""
    f = capture("reduce", tmp_path / "reduce.pt")
    assert f.__name__ == "reference"
    plain = run_both(workload, MoKConfig(mode="split", **SMALL_RING, stages={"reduce": stages.reduce.reference}))
    given = run_both(workload, MoKConfig(mode="split", **SMALL_RING, stages={"reduce": f}))
    for a, b in zip(given, plain, strict=True):
        assert_same(a, b)
    (tmp_path / "reduce.pt").unlink()
    arguments = torch.zeros(6, 64).bfloat16(), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), None
    assert torch.equal(capture("reduce", tmp_path / "reduce.pt")(*arguments), stages.reduce.reference(*arguments))
    assert not (tmp_path / "reduce.pt").exists()
