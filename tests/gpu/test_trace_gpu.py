"""Timelines of kernels: every task once, nothing overlaps, nothing is missing, and the bits are the same."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import FULL_RING, SMALL_RING, make_workload, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, cli
from mok_modular.protocol import trace, trace_plot
from mok_modular.targets.cuda import trace as cuda_trace
from mok_modular.testing import Workload, faults

DEVICE = "cuda:0"
PLANS = ("split", "fused", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down+combine")
SIZES = {"H": 320, "I": 384, "S": 192, "E": 8, "K": 3}


def workload_of(num_ranks: int) -> Workload:
    return helpers.regroup(make_workload([801], **SIZES), num_ranks)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def run(
    workload: Workload, config: MoKConfig, num_calls: int = 1
) -> tuple[list[Tensor], trace.Trace, list[dict[str, int]]]:
    """Outputs by rank, the trace of all calls, and what each rank's schedule says of its rows."""
    moved = workload.to(DEVICE)

    def step(member: Any) -> tuple[Tensor, Any, dict[str, int]]:
        workspace = helpers.workspace_for(moved, member, config)
        for _ in range(num_calls):
            schedule = helpers.build(moved, workspace, config)
            output, _ = helpers.forward(moved, workspace, config, schedule)
        workspace.check()
        return output, workspace, {"blocks": int(schedule.counts[0]) // 128, "routes": int(schedule.counts[2])}

    by_rank = LocalGroup(workload.num_ranks, device=DEVICE).run(step)
    return [each[0] for each in by_rank], by_rank[0][1].trace(), [each[2] for each in by_rank]


def expected_tasks(workload: Workload, config: MoKConfig, found: list[dict[str, int]]) -> dict[tuple[int, str], int]:
    """Tasks of a forward by rank and stage, as csrc/protocol/tasks.h cuts them."""
    hidden, inter, shared = SIZES["H"], SIZES["I"], SIZES["S"]
    is_alone = {stages[0] for stages in config.plan.groups if len(stages) == 1}
    tasks: dict[tuple[int, str], int] = {}
    for rank, counts in enumerate(found):
        num_tokens, blocks = len(workload.x[rank]), counts["blocks"]
        token_blocks = ceil_div(num_tokens, 128)
        mine = {
            "publish": 1 if len(found) == 1 else max(1, ceil_div(num_tokens, 8)),
            "shared_gate_up": token_blocks * ceil_div(shared, 128),
            "shared_down": token_blocks * ceil_div(hidden, 256),
            "dispatch": ceil_div(counts["routes"], 16) if config.dispatch == "push" else blocks * 8,
            "gate_up": blocks * ceil_div(inter, 128),
            "down": blocks * ceil_div(hidden, 256),
            "reduce": max(1, ceil_div(num_tokens, 8)),
        }
        if not any({"gate_up", "swiglu"} <= set(stages) for stages in config.plan.groups):
            mine["swiglu"] = blocks * 4
        if config.combine == "pull":
            mine["combine"] = ceil_div(num_tokens * SIZES["K"], 16)
        elif "combine" in is_alone:
            mine["combine"] = blocks * 8
        tasks |= {(rank, stage): count for stage, count in mine.items()}
    return tasks


def check(found: trace.Trace) -> None:
    assert found.unit == "ns"
    assert found.num_dropped == 0
    assert found.overlaps() == []
    assert all(each.begin < each.end for each in found.intervals)
    assert min(found.coverage().values()) >= 0.95
    for each in found.intervals:
        assert each.kind in trace.KINDS
        assert each.kind == "wait" or each.kernel == "fused" or each.stage in each.kernel.split("+"), each


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_every_task_once(plan: str, num_ranks: int) -> None:
    workload, config = workload_of(num_ranks), MoKConfig(mode=plan, **SMALL_RING, trace=True)
    _, found, counts = run(workload, config)
    check(found)
    assert found.calls == ["schedule", "forward"]
    done = [each for each in found.intervals if each.kind == "work" and found.calls[each.call] == "forward"]
    assert Counter((each.rank, each.stage) for each in done) == expected_tasks(workload, config, counts)
    tasks = Counter((each.rank, each.stage, each.block, each.part) for each in done)
    assert set(tasks.values()) == {1}
    scheduled = {each.rank for each in found.intervals if each.stage == "schedule" and each.kind == "work"}
    assert scheduled == set(range(num_ranks))
    # A tile's time is its consumers'; its loads and signals are other workers'.
    by_role = {role: {each.kind for each in found.intervals if found.role(each.worker) == role} for role in found.roles}
    assert by_role["consumers"] <= {"wait", "work", "store"}
    assert by_role["producer"] == {"wait", "load"}
    assert by_role["publisher"] == {"wait", "publish"}
    assert by_role["scheduler"] == {"wait"}
    assert by_role["CTA"] >= {"wait", "work"}
    loads = Counter((each.rank, each.stage) for each in found.intervals if each.kind == "load")
    products = ("gate_up", "down", "shared_gate_up", "shared_down")
    assert loads == Counter((each.rank, each.stage) for each in done if each.stage in products)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "split", **FULL_RING, "dispatch": "push", "combine": "pull"},
        {"mode": "fused", **FULL_RING, "dispatch": "push", "combine": "pull"},
        {"mode": "fused", **SMALL_RING, "fwd_num_comm_sms": 16},
        {"mode": "split", **SMALL_RING, "fwd_num_comm_sms": 16},
    ],
    ids=str,
)
def test_ablations(options: dict[str, Any]) -> None:
    workload, config = workload_of(4), MoKConfig(**options, trace=True)
    _, found, counts = run(workload, config)
    check(found)
    done = [each for each in found.intervals if each.kind == "work" and found.calls[each.call] == "forward"]
    assert Counter((each.rank, each.stage) for each in done) == expected_tasks(workload, config, counts)
    waits = [each for each in found.intervals if each.kind == "wait"]
    peers: dict[str, set[int]] = {}
    for each in waits:
        peers.setdefault(each.edge, set()).add(each.peer)
    assert peers["tickets"] == {-1}
    assert all(
        peers[edge] <= set(range(4)) for edge in peers.keys() & {"input_ready", "done", "x_arrived", "y_arrived"}
    )


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits(plan: str, num_ranks: int) -> None:
    workload = workload_of(num_ranks)
    traced = run(workload, MoKConfig(mode=plan, **SMALL_RING, trace=True), num_calls=2)[0]
    plain = run(workload, MoKConfig(mode=plan, **SMALL_RING), num_calls=2)[0]
    assert same_bits(torch.cat(traced), torch.cat(plain))


def test_calls_follow_one_another() -> None:
    _, found, _ = run(workload_of(1), MoKConfig(**SMALL_RING, trace=True), num_calls=3)
    check(found)
    assert found.calls == ["schedule", "forward"] * 3
    for call_idx in range(1, len(found.calls)):
        before = max(each.end for each in found.intervals if each.call == call_idx - 1)
        assert min(each.begin for each in found.intervals if each.call == call_idx) >= before - 10


def test_kernels_follow_one_another() -> None:
    """One clock for all SMs: without a second stream no kernel begins before the one before has ended."""
    _, found, _ = run(workload_of(1), MoKConfig(mode="split", **SMALL_RING, trace=True))
    mine = [each for each in found.intervals if found.calls[each.call] == "forward"]
    spans = [
        (min(each.begin for each in part), max(each.end for each in part))
        for launch in sorted({each.launch for each in mine})
        if (part := [each for each in mine if each.launch == launch])
    ]
    assert all(after[0] >= before[1] - 1000 for before, after in pairwise(spans))


def test_some_calls_only_and_reading_in_between() -> None:
    workload = make_workload([300]).to(DEVICE)
    plain, traced = MoKConfig(**SMALL_RING), MoKConfig(**SMALL_RING, trace=True)

    def step(member: Any) -> None:
        workspace = helpers.workspace_for(workload, member, plain)
        first = helpers.call(workload, workspace, plain)
        assert workspace.trace().intervals == []
        outputs = [helpers.call(workload, workspace, config) for config in (traced, plain, traced)]
        assert workspace.trace().calls == ["schedule", "forward"] * 2
        check(workspace.trace())
        num_intervals = len(workspace.trace().intervals)
        assert len(workspace.trace().intervals) == num_intervals  # nothing twice
        outputs.append(helpers.call(workload, workspace, traced))
        kept = workspace.trace()
        assert len(kept.intervals) > num_intervals
        check(kept)
        outputs.append(helpers.call(workload, workspace, traced))
        workspace.clear_trace()
        assert workspace.trace().intervals == []
        assert kept.calls == ["schedule", "forward"] * 3
        assert all(same_bits(first, output) for output in outputs)
        workspace.check()

    LocalGroup(1, device=DEVICE).run(step)


def test_no_host_synchronisation() -> None:
    workload = make_workload([300]).to(DEVICE)
    config = MoKConfig(**SMALL_RING, trace=True)
    workspace = helpers.workspace_for(workload, LocalGroup(1, device=DEVICE).members[0], config)
    helpers.call(workload, workspace, config)
    helpers.call(workload, workspace, config)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            helpers.call(workload, workspace, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert workspace.trace().calls == ["schedule", "forward"] * 5
    check(workspace.trace())


@pytest.mark.parametrize("num_records", [1, 100, 1001])
def test_dropped_records_are_counted(num_records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MoKConfig(mode="fused", **SMALL_RING, trace=True)
    workload = workload_of(4)
    base = run(workload, MoKConfig(mode="fused", **SMALL_RING))[0]
    monkeypatch.setattr(cuda_trace, "NUM_RECORDS", num_records)
    outputs, found, _ = run(workload, config)
    assert same_bits(torch.cat(base), torch.cat(outputs))
    assert found.num_dropped > 1000
    assert 0 < len(found.intervals) <= num_records
    assert found.overlaps() == []
    assert found.to_chrome()["otherData"]["num_dropped"] == found.num_dropped


def test_graphs_and_faults_are_refused_by_name() -> None:
    workload = make_workload([64]).to(DEVICE)
    config = MoKConfig(**SMALL_RING, trace=True)
    workspace = helpers.workspace_for(workload, LocalGroup(1, device=DEVICE).members[0], config)
    first = helpers.call(workload, workspace, config)
    refused = pytest.raises(ValueError, match="trace=True cannot be captured in a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        helpers.call(workload, workspace, config)
    torch.cuda.synchronize()
    with faults.plant("drop:x_ready,rank=0"), pytest.raises(ValueError, match="planted faults are for CPU ranks"):
        helpers.call(workload, workspace, config)
    assert same_bits(helpers.call(workload, workspace, config), first)
    workspace.check()


def test_an_expired_wait_is_in_it() -> None:
    workload = make_workload([300]).to(DEVICE)
    config = MoKConfig(timeout_s=1, start_timeout_s=1, **SMALL_RING, trace=True)
    workspace = helpers.workspace_for(workload, LocalGroup(1, device=DEVICE).members[0], config)
    helpers.call(workload, workspace, config)
    schedule = helpers.build(workload, workspace, config)
    workspace.check()
    shared: Any = workspace.shared
    shared.region(0, "words", torch.int64)[4:6] = 0  # done[2][R] of csrc/layout.h: the last call's is lost
    workspace.clear_trace()
    helpers.forward(workload, workspace, config, schedule)
    open_waits = [each for each in workspace.trace().intervals if not each.is_closed]
    assert "done" in {each.edge for each in open_waits}
    assert max(each.end - each.begin for each in open_waits) >= 0.95e9
    workspace.reset()
    helpers.call(workload, workspace, config)
    workspace.check()


def test_clock() -> None:
    """What one tick of the clock is: printed, and fine enough for a tile."""
    _, found, _ = run(workload_of(1), MoKConfig(mode="fused", **SMALL_RING, trace=True), num_calls=20)
    ends = sorted({each.end for each in found.intervals})
    tick = min(b - a for a, b in pairwise(ends) if b - a > 1)
    print(f"the clock of {torch.cuda.get_device_name()} ticks every {tick} ns")
    assert tick <= 1100


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "200", "--ranks", "2", "--device", DEVICE, "--json"]
    for mode in ("split", "fused"):
        assert cli.main(["run", *small, "--mode", mode, "--trace", str(tmp_path / f"{mode}.json")]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]
        data = json.loads((tmp_path / f"{mode}.json").read_text())
        events = [event for event in data["traceEvents"] if event["ph"] == "X"]
        assert {"gate_up", "dispatch"} <= {event["args"]["stage"] for event in events if event["cat"] == "work"}
        assert data["otherData"] == {"unit": "ns", "num_dropped": 0, "calls": ["schedule", "forward"]}
        names = {event["args"]["name"] for event in data["traceEvents"] if event["ph"] == "M"}
        assert {"rank 0", "rank 1"} <= names
        assert any(re.fullmatch(r"compute CTA \d+ / consumers", name) for name in names)


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {
        mode: run(workload_of(1), MoKConfig(mode=mode, **SMALL_RING, trace=True))[1] for mode in ("split", "fused")
    }
    trace_plot.plot(found, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    argv = ["ab", "--device", DEVICE, "--routing", "random", "--shape", "256,384,16,4,128", "--tokens", "300"]
    assert cli.main([*argv, "--ranks", "2", "--iters", "2", "--timeline", str(tmp_path / "ab.png")]) == 0
    assert (tmp_path / "ab.png").stat().st_size > 10_000
