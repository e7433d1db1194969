"""benchmarks/bars.py: what it prints, its exit code when a bar is missed, and which records are fresh."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

GROUP = """
from bar import Bar

def bars(quick):
    yield Bar("differing runs", {differing}, "at most", 0)
    if not quick:
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
    assert report["quick"] is False
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


def test_quick_is_a_part_of_the_group(run: Run) -> None:
    exit_code, out = run("made_up_quick", "0", "1.0", "--quick", "--json")
    assert exit_code == 0
    report = json.loads(out)
    assert report["quick"] is True
    assert [bar["name"] for bar in report["bars"]] == ["differing runs"]
    assert run("made_up_whole", "0", "1.0", "--full")[0] == 1


@pytest.mark.parametrize("argv", [[], ["--records", "forward_cpu"], ["forward_cpu", "--quick", "--full"]])
def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    bars = importlib.import_module("bars")
    monkeypatch.setattr("sys.argv", ["bars.py", *argv])
    with pytest.raises(SystemExit) as raised:
        bars.main()
    assert raised.value.code == 2


def test_every_group_has_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for group in importlib.import_module("bars").GROUPS:
        module = ast.parse((BENCHMARKS / f"bars_{group}.py").read_text())
        (bars,) = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "bars"]
        assert [argument.arg for argument in bars.args.args] in (["quick"], ["quick", "seconds"]), group


def test_seconds_and_the_name_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(tmp_path)
    bars = importlib.import_module("bars")
    code = 'RECORD, figures = "other", {}\n' + GROUP.format(differing="0", speed="seconds or 30")
    (tmp_path / "bars_made_up_timed.py").write_text(code.replace("bars(quick)", "bars(quick, seconds=None)"))
    (tmp_path / "bars_made_up_untimed.py").write_text(GROUP.format(differing="0", speed="30"))
    importlib.invalidate_caches()
    monkeypatch.setattr(bars, "GROUPS", ["made_up_timed", "made_up_untimed"])
    names = []
    monkeypatch.setattr(bars, "write_results", lambda name, *_, **__: names.append(name))
    monkeypatch.setattr(bars, "covered_files", lambda path: [])
    for options, speed in (([], 30), (["--seconds", "12.5"], 12.5)):
        monkeypatch.setattr("sys.argv", ["bars.py", "made_up_timed", "--json", *options])
        assert bars.main() == 0
        assert json.loads(capsys.readouterr().out)["bars"][1]["value"] == speed
    assert names == ["other", "other"]
    monkeypatch.setattr("sys.argv", ["bars.py", "made_up_untimed", "--seconds", "1"])
    with pytest.raises(SystemExit):
        bars.main()
    assert "--seconds: made_up_untimed has no random runs" in capsys.readouterr().err


# ---- records ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in a repository of its own."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("machine")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "describe", lambda: {"date": "2026-01-01"})
    for file in ("csrc/stages/a.h", "mok_modular/a.py", "benchmarks/bars_a.py", "benchmarks/b.py", "scripts/c.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("# as it was")
    (tmp_path / "benchmarks" / "bars_a.py").write_text("""import b, os\nCOVERS = ("scripts/c.py",)\n""")
    return module


@pytest.mark.parametrize(
    ("edited", "state"),
    [
        ("", "fresh"),
        ("csrc/stages/README.md", "fresh"),
        ("benchmarks/bars_of_another_group.py", "fresh"),
        ("csrc/stages/a.h", "stale"),
        ("csrc/stages/new.h", "stale"),
        ("mok_modular/a.py", "stale"),
        ("benchmarks/bars_a.py", "stale"),
        ("benchmarks/b.py", "stale"),
        ("scripts/c.py", "stale"),
    ],
)
def test_a_record_is_fresh_until_its_sources_change(machine: Any, tmp_path: Path, edited: str, state: str) -> None:
    covers = machine.covered_files(tmp_path / "benchmarks" / "bars_a.py")
    bars = [{"ok": True}, {"ok": False}]
    path = machine.write_results("a", {"bars": bars}, tmp_path / "results", covers)
    if edited:
        (tmp_path / edited).write_text("# as it is now")
    found = machine.state_of_record(path)
    assert found == machine.RecordState(path.name, "2026-01-01", "1 of 2", state)


def test_a_record_whose_source_is_gone_or_that_names_none_is_stale(machine: Any, tmp_path: Path) -> None:
    path = machine.write_results("a", {"quick": True}, tmp_path, [tmp_path / "scripts" / "c.py"])
    assert machine.state_of_record(path).state == "fresh"
    (tmp_path / "scripts" / "c.py").unlink()
    assert machine.state_of_record(path).state == "stale"
    record = json.loads(path.read_text())
    del record["sources"]
    path.write_text(json.dumps(record))
    assert machine.state_of_record(path).state == "stale: names no sources"


def test_records_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the repository."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    bars = importlib.import_module("bars")
    monkeypatch.setattr("sys.argv", ["bars.py", "--records", "--json"])
    assert bars.main() == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [record["name"] for record in records] == sorted(path.name for path in BENCHMARKS.glob("results/*.json"))
    assert {record["state"].split(":")[0] for record in records} <= {"fresh", "stale"}
