"""Every command and every line of Python in docs/tour.md, in order, and what is behind its commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, make_workload, run, run_both

from mok_modular import MoKConfig, cli
from mok_modular.cli.explain import Walk, converse, describe
from mok_modular.cli.sweep_points import AXES, GPU_ONLY, skewed, sweep
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.testing import capture
from mok_modular.testing.capture import replay

TOUR = Path(__file__).resolve().parents[2] / "docs" / "tour.md"
FAILING = ("--fault ",)


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", TOUR.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    return [line for block in blocks("") for line in block.splitlines()]


def test_the_tour_has_commands() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=[pytest.mark.slow] if "--timeline" in line else []) for line in commands()],
)
def test_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell, as it stands there."""
    if "--timeline" in command:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    if "swiglu.pt" in command:
        captured = {"swiglu": capture("swiglu", "swiglu.pt")}
        run(make_workload([60, 50], E=4), MoKConfig(mode="split", **SMALL_RING, stages=captured))
    line = command.replace("mok-modular", f"{sys.executable} -m mok_modular.cli")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=170)
    assert done.returncode == (1 if any(word in command for word in FAILING) else 0), done.stdout + done.stderr
    if "--fault" in command:
        assert re.search(r"nobody will publish|wrong number of arrivals|So rank 1", done.stdout + done.stderr)
    for name in ("both.png", "fused.json", "out/args.pt"):
        if name.split("/")[0] in command.split():
            assert (tmp_path / name).stat().st_size > 0


def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    exec(code, {})
    out = capsys.readouterr().out
    assert re.search(r"^limit +BROKEN", out, re.MULTILINE)
    assert re.search(r"^(rounding|values) +BROKEN", out, re.MULTILINE)
    assert re.search(r"^carry +BROKEN", out.partition("\nwgrad\n")[2], re.MULTILINE)
    assert "BROKEN" not in re.sub(r"^carry .*", "", out.partition("\nwgrad\n")[2], flags=re.MULTILINE)


# ---- explain ----


@pytest.fixture(scope="module")
def walk() -> Walk:
    from helpers import call, workspace_for

    from mok_modular import LocalGroup

    config = MoKConfig(mode="split", **SMALL_RING, trace=True)
    workload = make_workload([60, 50], E=4)

    def step(member: Any) -> Any:
        workspace = workspace_for(workload, member, config)
        call(workload, workspace, config)
        return workspace.trace()

    return Walk(LocalGroup(2).run(step)[0])


def test_walk(walk: Walk) -> None:
    walk.position = 0
    first = walk.next(2)
    assert len(first) == 2
    assert first[0].begin <= first[1].begin
    (wait,) = walk.run_to("y_ready")
    assert wait.kind == "wait"
    assert wait.edge == "y_ready"
    assert wait in walk.waits()
    assert walk.run_to("nothing") == []
    assert len(walk.next(10**6)) > 0
    assert walk.next() == []


def test_conversation(walk: Walk) -> None:
    walk.position = 0
    said = list(converse(walk, ["next 2", "run y_ready", "run nothing", "edges", "what", "quit", "next"]))
    assert said[:2] == [describe(step) for step in walk.steps[:2]]
    assert "for y_ready[" in said[2]
    assert said[3].startswith("no further wait for 'nothing'")
    assert "y_ready" in said[4]
    assert "run EDGE" in said[-1]


# ---- sweep ----


def test_sweep() -> None:
    workload = make_workload([60, 50], E=4)
    rows = sweep(workload, {"plan": ["fused", "split"], "workers": [1, 4]})
    assert [(row["plan"], row["workers"]) for row in rows] == [
        ("fused", 1),
        ("fused", 4),
        ("split", 1),
        ("split", 4),
    ]
    assert rows[0]["over_first"] == 1.0
    assert rows[1]["steps"] < rows[0]["steps"]
    assert rows[2]["num_bytes"] > rows[0]["num_bytes"]  # y and hidden go through memory
    assert all(row["work"] > 0 and row["idle"] >= 0 for row in rows)


def test_every_axis() -> None:
    values = {"plan": ["split"], "minibatch": [128], "macrobatch": [256], "grain": ["minibatch"], "direction": ["pull"]}
    values |= {"ring": ["serial"], "workers": [2], "imbalance": [0.5], "tokens": [40]}
    assert values.keys() == AXES.keys() - set(GPU_ONLY)
    assert len(sweep(make_workload([60, 50], E=4), values)) == 1


def test_skewed() -> None:
    workload = make_workload([60, 50], E=4)
    before = torch.cat(workload.expert_ids).eq(0).sum()
    assert torch.cat(skewed(workload, 0.5).expert_ids).eq(0).sum() > before + 50
    with pytest.raises(ValueError, match="imbalance must be 0 to 1"):
        skewed(workload, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--over", "colour=red"], "AXIS one of plan"),
        (["sweep", "--over", "workers=two"], "takes numbers"),
        (["sweep", "--over", "direction=up"], "direction must be pull, pull_once or push"),
        (["stages", "--only", "schedule", "--input", "x.pt"], "with --input, --only must be one of dispatch"),
        (["stages", "--input", "x.pt"], "--input needs --only"),
        (["explain", "--tokens", "0"], "--tokens must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "--over", "workers=2", "--tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["workers"] == 2
    assert cli.main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]


# ---- one stage alone ----


@pytest.mark.parametrize("name", SIGNATURES)
def test_captured_stage(name: str, tmp_path: Path) -> None:
    path = tmp_path / "stage.pt"
    run_both(make_workload([60, 50], E=4), MoKConfig(mode="split", **SMALL_RING, stages={name: capture(name, path)}))
    found = replay(name, path, tmp_path / "out")
    assert found["max_error"] <= 0.05
    if name in ("dispatch", "combine", "reverse_combine", "reverse_dispatch"):
        assert found["is_same"]
    assert (tmp_path / "out" / "launched_0.pt").exists()
    other = "swiglu" if name != "swiglu" else "reduce"
    with pytest.raises(ValueError, match=f"holds '{name}', not '{other}'"):
        replay(other, path)


def test_capture_of_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stages that can be captured are dispatch"):
        capture("schedule", tmp_path / "x.pt")
    torch.save([1], tmp_path / "x.pt")
    with pytest.raises(ValueError, match="not a captured stage: it holds a list"):
        replay("swiglu", tmp_path / "x.pt")
