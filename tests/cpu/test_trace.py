"""Traces: intervals that do not overlap and cover their workers, and the files made of them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    FULL_RING,
    SMALL_RING,
    build,
    call,
    forward,
    make_workload,
    run,
    same_bits,
    weights_of,
    workspace_for,
)

from mok_modular import LocalGroup, MoKConfig, cli, functional
from mok_modular.protocol import trace, trace_plot
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload

PUSH_AND_PULL = {**FULL_RING, "dispatch": "push", "combine": "pull"}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


def traced(workload: Workload, num_calls: int = 1, group: dict[str, Any] | None = None, **options: Any) -> trace.Trace:
    config = MoKConfig(**{**SMALL_RING, **options}, trace=True)

    def step(member: Any) -> trace.Trace:
        workspace = workspace_for(workload, member, config)
        for _ in range(num_calls):
            call(workload, workspace, config)
        return workspace.trace()

    return LocalGroup(workload.num_ranks, **(group or {})).run(step)[0]


def check(found: trace.Trace, unit: str) -> None:
    assert found.unit == unit
    assert found.num_dropped == 0
    assert found.overlaps() == []
    assert all(each.begin < each.end for each in found.intervals)
    assert min(found.coverage().values()) >= 0.95


@pytest.mark.parametrize("plan", [str(plan) for plan in all_plans()])
def test_intervals_on_fibers(workload: Workload, plan: str) -> None:
    found = traced(workload, mode=plan)
    check(found, "steps")
    worked = {each.stage for each in found.intervals if each.kind == "work"}
    inside = {stage for group in MoKConfig(mode=plan).plan.groups for stage in group}
    if {"gate_up", "swiglu"} <= set(next(g for g in MoKConfig(mode=plan).plan.groups if "gate_up" in g)):
        inside -= {"swiglu"}  # in gate_up's epilogue
    if {"down", "combine"} <= set(next(g for g in MoKConfig(mode=plan).plan.groups if "down" in g)):
        inside -= {"combine"}  # in down's store
    assert worked == inside | {"schedule", "publish", "shared_gate_up", "shared_down", "reduce"}


@pytest.mark.parametrize("mode", ["split", "fused"])
def test_intervals_on_threads(workload: Workload, mode: str) -> None:
    check(traced(workload, mode=mode, num_calls=2, group={"executor": "threads"}), "ns")


def test_push_and_pull_wait_for_peers(workload: Workload) -> None:
    """Who is waited for, and for which word."""
    found = traced(workload, mode="split", **PUSH_AND_PULL)
    check(found, "steps")
    waits = [each for each in found.intervals if each.kind == "wait" and each.edge != "tickets"]
    assert waits
    peers = {each.edge: set() for each in waits}
    for each in waits:
        peers[each.edge].add(each.peer)
    assert all(peers[edge] == {-1} for edge in peers.keys() & {"x_ready", "hidden_ready", "shared_ready"})
    assert all(peers[edge] <= {0, 1} for edge in peers.keys() & {"done", "entered", "x_arrived", "y_arrived"})


def test_steps_are_the_same_every_time(workload: Workload) -> None:
    assert traced(workload, mode="fused").intervals == traced(workload, mode="fused").intervals


def test_fused_takes_fewer_steps_than_split(workload: Workload) -> None:
    """What the picture is for: logical time sees the overlap."""

    def length(mode: str) -> int:
        found = traced(workload, mode=mode)
        forward = [each for each in found.intervals if found.calls[each.call] == "forward"]
        return max(each.end for each in forward) - min(each.begin for each in forward)

    assert length("fused") < length("split")


def test_calls_follow_one_another(workload: Workload) -> None:
    found = traced(workload, num_calls=3)
    check(found, "steps")
    assert found.calls == ["schedule", "forward"] * 3
    for call_idx in range(1, len(found.calls)):
        before = max(each.end for each in found.intervals if each.call == call_idx - 1)
        assert min(each.begin for each in found.intervals if each.call == call_idx) >= before


def test_bits_do_not_depend_on_it(workload: Workload) -> None:
    config = MoKConfig(mode="fused", **SMALL_RING)
    assert same_bits(run(workload, config), run(workload, MoKConfig(mode="fused", **SMALL_RING, trace=True)))


@pytest.mark.parametrize("mode", ["split", "fused"])
def test_backward(workload: Workload, mode: str) -> None:
    config = MoKConfig(mode=mode, **SMALL_RING, trace=True)

    def step(member: Any) -> trace.Trace:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        x, weights = workload.x[rank], workload.router_weights[rank]
        functional.backward(config, workspace, schedule, context, x, x, weights, *weights_of(workload, member))
        return workspace.trace()

    found = LocalGroup(2).run(step)[0]
    check(found, "steps")
    assert found.calls == ["schedule", "forward", "backward"]
    assert {"down_dgrad", "wgrad"} <= {each.stage for each in found.intervals if each.kind == "work"}


def test_off_keeps_nothing() -> None:
    workload = make_workload([150], E=6, K=3)

    def step(member: Any) -> int:
        workspace = workspace_for(workload, member, MoKConfig(**SMALL_RING))
        call(workload, workspace, MoKConfig(**SMALL_RING))
        none = len(workspace.trace().intervals)
        call(workload, workspace, MoKConfig(**SMALL_RING, trace=True))  # a call may ask for it alone
        assert workspace.trace().intervals
        workspace.clear_trace()
        return none + len(workspace.trace().intervals)

    assert LocalGroup(1).run(step) == [0]


def test_dropped_records_are_counted(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = traced(workload)
    monkeypatch.setattr(trace, "MAX_RECORDS", 100)
    found = traced(workload)
    assert len(found.intervals) == 100
    assert found.num_dropped == len(whole.intervals) - 100
    assert found.to_chrome()["otherData"]["num_dropped"] == found.num_dropped


def test_chrome_format(workload: Workload, tmp_path: Path) -> None:
    found = traced(workload, mode="split")
    found.save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(found.intervals)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["dur"] > 0
        assert event["cat"] in trace.KINDS
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
    named = {(event["pid"], event.get("tid")) for event in data["traceEvents"] if event["ph"] == "M"}
    assert by_track.keys() <= named
    assert data["otherData"]["unit"] == "steps"


@pytest.mark.slow
def test_picture(workload: Workload, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace_plot.plot({mode: traced(workload, mode=mode) for mode in ("split", "fused")}, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="has no call 'backwards'"):
        trace_plot.plot({"split": traced(workload)}, tmp_path / "none.png", call="backwards")


def test_picture_without_matplotlib(workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"mok-modular\[plot\]"):
        trace_plot.plot({"split": traced(workload)}, tmp_path / "both.png")


SMALL_RUN = ["--tokens", "48", "--ranks", "2", "--json"]


def test_run_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *SMALL_RUN, "--mode", "split", "--trace", str(tmp_path / "run.json")]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_ab_draws_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["ab", *SMALL_RUN, "--iters", "1", "--timeline", str(tmp_path / "ab.png")]) == 0
    assert json.loads(capsys.readouterr().out)["bits_identical"]
    assert (tmp_path / "ab.png").stat().st_size > 1000
