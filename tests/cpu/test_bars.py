"""benchmarks/bars.py: what it prints, and its exit code when a bar is missed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

GROUP = """
from bar import Bar

def bars():
    yield Bar("differing runs", {differing}, "at most", 0)
    yield Bar("speed", {speed}, "at least", 10, "GFLOP/s")
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs bars.py on a made-up group with the given figures; returns exit code and stdout."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(tmp_path)
    bars = importlib.import_module("bars")

    def run_group(name: str, differing: str, speed: str, *options: str) -> tuple[int, str]:
        (tmp_path / f"bars_{name}.py").write_text(GROUP.format(differing=differing, speed=speed))
        importlib.invalidate_caches()
        monkeypatch.setattr(bars, "GROUPS", [name])
        monkeypatch.setattr("sys.argv", ["bars.py", name, *options])
        exit_code = bars.main()
        return exit_code, capsys.readouterr().out

    return run_group


def test_all_bars_hold(run: Run) -> None:
    exit_code, out = run("made_up_fine", "0", "12.5", "--json")
    report = json.loads(out)
    assert exit_code == 0
    assert report["ok"] is True
    assert report["bars"] == [
        {"name": "differing runs", "value": 0, "rule": "at most", "bar": 0, "unit": "", "ok": True},
        {"name": "speed", "value": 12.5, "rule": "at least", "bar": 10, "unit": "GFLOP/s", "ok": True},
    ]


@pytest.mark.parametrize(("name", "differing", "speed"), [("bits", "1", "10"), ("slow", "0", "9.9")])
def test_a_missed_bar_is_exit_code_1(run: Run, name: str, differing: str, speed: str) -> None:
    exit_code, out = run(f"made_up_{name}", differing, speed)
    assert exit_code == 1
    assert [line.split()[-1] for line in out.splitlines()].count("MISSED") == 1


def test_nan_is_a_miss_and_json_stays_strict(run: Run) -> None:
    exit_code, out = run("made_up_nan", "0", "float('nan')", "--json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    report = json.loads(out, parse_constant=refuse)
    assert exit_code == 1
    assert report["bars"][1]["value"] is None
    assert [bar["ok"] for bar in report["bars"]] == [True, False]


def test_the_groups_are_the_modules_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert "forward_cpu" in importlib.import_module("bars").GROUPS
