"""Every planted fault gives the error of its kind, which names the culprit, and the next call works after reset."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
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

from mok_modular import LocalGroup, MoKConfig, MoKDeadlockError, MoKSignalError, MoKTimeoutError, cli, functional
from mok_modular.targets.shared_workspace import planted_faults
from mok_modular.testing import Workload, faults

FIELDS = {"rank", "stage", "task", "edge", "index", "have", "want", "peer"}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


def fail_and_recover(workload: Workload, config: MoKConfig, *planted: faults.Fault | str, **group: Any) -> Exception:
    """The error that rank 0 gets; the same on every rank, and the same bits as before after a reset."""

    def step(member: Any) -> Exception:
        workspace = workspace_for(workload, member, config)
        expected = call(workload, workspace, config)
        member.group.meet(member.rank(), "plant", None, lambda p: [block.__enter__()] + [None] * (len(p) - 1), 10)
        try:
            with pytest.raises(MoKTimeoutError) as caught:
                call(workload, workspace, config)
        finally:
            member.group.meet(
                member.rank(), "end", None, lambda p: [block.__exit__(None, None, None)] + [None] * (len(p) - 1), 10
            )
        workspace.reset()
        for _ in range(3):
            assert same_bits(call(workload, workspace, config), expected)
        return caught.value

    block = faults.plant(*planted)
    first, *others = LocalGroup(workload.num_ranks, **group).run(step)
    assert all(type(other) is type(first) and str(other) == str(first) for other in others)
    return first


def work_all_the_same(workload: Workload, config: MoKConfig, *planted: faults.Fault | str, **group: Any) -> None:
    expected = run(workload, config)
    with faults.plant(*planted):
        assert same_bits(run(workload, config, **group), expected)


@pytest.mark.parametrize("fault", ["drop:x_ready,rank=9", "drop:input_ready,rank=0,dst=2", "stop:rank=2"])
def test_a_fault_of_a_rank_that_is_not_there(workload: Workload, fault: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING)
    with faults.plant(fault), pytest.raises(ValueError, match=r"planted fault \(\w+\) is of rank \d, the group has 2"):
        run(workload, config)
    run(workload, config)


# ---- signals ----

COUNTED = ["x_ready", "gate_up_ready", "hidden_ready", "y_ready", "slot_free", "shared_hidden_ready", "shared_ready"]


@pytest.mark.parametrize("edge", [*COUNTED, "input_ready", "done", "topk_ready", "ids_counted"])
def test_dropped(workload: Workload, edge: str) -> None:
    error = fail_and_recover(workload, MoKConfig(mode="split", **SMALL_RING), faults.drop(edge, rank=1))
    assert type(error) is MoKDeadlockError
    assert f"nobody will publish {edge}[" in str(error)
    assert "waits for rank 1" in str(error)
    assert all(wait.keys() >= FIELDS for wait in error.waits)


@pytest.mark.parametrize("edge", COUNTED)
def test_duplicated_arrival(workload: Workload, edge: str) -> None:
    """Whether the waiter looked before or after the surplus arrival."""
    error = fail_and_recover(workload, MoKConfig(mode="split", **SMALL_RING), faults.duplicate(edge, rank=1))
    assert type(error) is MoKSignalError
    assert f"{edge}[" in str(error)
    assert "of rank 1 has the wrong number of arrivals" in str(error)
    assert all(wait["have"] > wait["want"] and wait["rank"] == 1 for wait in error.waits)


@pytest.mark.parametrize("edge", ["input_ready", "done", "topk_ready", "entered"])
def test_a_word_that_is_set_twice_changes_nothing(workload: Workload, edge: str) -> None:
    work_all_the_same(workload, MoKConfig(mode="split", **SMALL_RING), faults.duplicate(edge, rank=1))


@pytest.mark.parametrize("by", [-1, 1, -3])
@pytest.mark.parametrize("edge", COUNTED)
def test_corrupted_count(workload: Workload, edge: str, by: int) -> None:
    error = fail_and_recover(workload, MoKConfig(mode="split", **SMALL_RING), faults.corrupt(edge, rank=0, by=by))
    if by < 0 and type(error) is not MoKSignalError:  # below zero it is a large number
        assert type(error) is MoKDeadlockError
        assert f"nobody will publish {edge}[" in str(error)
        wait = next(wait for wait in error.waits if wait["edge"] == edge)
        assert (wait["have"] - wait["want"] - by) % 2**64 == 0
    else:
        assert type(error) is MoKSignalError
        assert f"{edge}[" in str(error)


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("edge", ["x_ready", "slot_free", "input_ready", "done", "topk_ready"])
def test_delayed(workload: Workload, edge: str, executor: str) -> None:
    by = 40 if executor == "fibers" else 0.002
    config = MoKConfig(mode="fused", **SMALL_RING)
    work_all_the_same(workload, config, faults.delay(edge, rank=1, by=by), executor=executor)


def test_delayed_beyond_the_timeout(workload: Workload) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0.3)
    error = fail_and_recover(workload, config, faults.delay("x_ready", 1, by=2.0, index=0), executor="threads")
    assert type(error) is MoKTimeoutError
    assert "timeout_s=0.3" in str(error)
    assert "nobody will publish x_ready[" in str(error)
    assert "rank 1, gate_up" in str(error)


# ---- ranks and stages ----


@pytest.mark.parametrize("after", [0, 1, 7, 30, 60])
@pytest.mark.parametrize("mode", ["split", "fused"])
def test_stopped_rank(workload: Workload, mode: str, after: int) -> None:
    error = fail_and_recover(workload, MoKConfig(mode=mode, **SMALL_RING), faults.stop(rank=1, after=after))
    assert type(error) is MoKDeadlockError
    first = str(error).splitlines()[0]
    assert "rank 1 in " in first
    assert "neither works nor waits" in first


def test_stopped_rank_on_threads(workload: Workload) -> None:
    config = MoKConfig(mode="fused", **SMALL_RING, timeout_s=0.3, start_timeout_s=0.3)
    error = fail_and_recover(workload, config, faults.stop(rank=0), executor="threads")
    assert type(error) is MoKTimeoutError
    assert "topk_ready[0]" in str(error).splitlines()[0]


@pytest.mark.parametrize(
    "stage", ["schedule", "publish", "dispatch", "gate_up", "shared_gate_up", "shared_down", "down", "reduce"]
)
def test_stalled_stage(workload: Workload, stage: str) -> None:
    """Once for ever, once for a while."""
    config = MoKConfig(mode="fused", **SMALL_RING)
    error = fail_and_recover(workload, config, faults.stall(stage, rank=1))
    assert type(error) is MoKDeadlockError
    assert f"rank 1 in {stage} task" in str(error)
    if stage != "reduce":  # for which nobody waits
        assert "waits for rank 1" in str(error)
    work_all_the_same(workload, config, faults.stall(stage, rank=1, by=30))


def test_push_and_pull(workload: Workload) -> None:
    config = MoKConfig(mode="split", **FULL_RING, dispatch="push", combine="pull")
    for edge in ("entered", "x_arrived", "y_arrived"):
        error = fail_and_recover(workload, config, faults.drop(edge, rank=0))
        assert f"nobody will publish {edge}[" in str(error)
        assert "waits for rank 0" in str(error)


BACKWARD = ["d_y_ready", "d_hidden_ready", "d_gate_up_ready", "d_x_ready", "segment_ready", "carry_done"]


@pytest.mark.parametrize("edge", [*BACKWARD, "shared_d_gate_up_ready", "slot_free", "gate_up_ready", "x_ready"])
def test_backward(edge: str) -> None:
    """Planted in the backward alone. One expert a rank, which goes through the ring twice."""
    workload = make_workload([150, 140], E=2, K=4)
    config = MoKConfig(mode="split", **SMALL_RING)

    def step(member: Any, fault: faults.Fault) -> Exception:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)

        def backward() -> tuple[Any, ...]:
            x, weights = workload.x[rank], workload.router_weights[rank]
            arguments = (context, x, x, weights, *weights_of(workload, member))
            return functional.backward(config, workspace, schedule, *arguments)

        expected = backward()
        member.group.meet(rank, "plant", None, lambda p: [block.__enter__()] + [None] * (len(p) - 1), 10)
        with pytest.raises(MoKTimeoutError) as caught:
            backward()
        member.group.meet(rank, "end", None, lambda p: [block.__exit__(None, None, None)] + [None] * (len(p) - 1), 10)
        workspace.reset()
        for a, b in zip(backward(), expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return caught.value

    for fault, kind in (
        (faults.drop(edge, rank=1), MoKDeadlockError),
        (faults.duplicate(edge, rank=1), MoKSignalError),
    ):
        block = faults.plant(fault)
        for error in LocalGroup(2).run(lambda member, fault=fault: step(member, fault)):
            assert type(error) is kind
            assert f"{edge}[" in str(error).splitlines()[0]
            assert "rank 1" in str(error).splitlines()[0]


def test_output_of_a_call_with_a_surplus_arrival_is_nan(workload: Workload) -> None:
    config = MoKConfig(mode="split", **SMALL_RING)
    outputs: list[torch.Tensor] = []

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        run_calls = workspace.shared.run

        def run_and_look(calls: Any) -> Any:
            outputs.extend(c.tensors["output"] for c in calls if "output" in c.tensors)
            return run_calls(calls)

        if member.rank() == 0:
            workspace.shared.run = run_and_look
        with pytest.raises(MoKSignalError):
            call(workload, workspace, config)

    with faults.plant("corrupt:y_ready,rank=0,by=1"):
        LocalGroup(2).run(step)
    assert outputs
    assert all(output.isnan().all() for output in outputs)


# ---- names ----


@pytest.mark.parametrize(
    "text",
    [
        "drop:x_ready,rank=1",
        "drop:input_ready,rank=0,dst=1",
        "delay:done,rank=1,by=0.5",
        "duplicate:hidden_ready,rank=1,index=2",
        "corrupt:x_ready,rank=1,by=-1",
        "stop:rank=1,after=3",
        "stall:swiglu,rank=0",
        "stall:swiglu,rank=0,index=1,by=50",
    ],
)
def test_names_go_both_ways(text: str) -> None:
    fault = faults.parse(text)
    assert str(fault) == text
    assert faults.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lose:x_ready,rank=1", "KIND one of drop"),
        ("drop:x_ready", "rank=N is missing"),
        ("drop:xready,rank=1", "needs an edge, one of entered"),
        ("drop:rank=1", "takes one name"),
        ("stall:hidden,rank=1", "needs a stage, one of dispatch"),
        ("stop:swiglu,rank=1", "takes no name"),
        ("drop:x_ready,rank=1,by=2", "drop takes dst, index, rank, got 'by'"),
        ("drop:x_ready,rank=one", "rank must be a number"),
        ("corrupt:done,rank=1,by=1", "a word that one rank sets"),
        ("corrupt:x_ready,rank=1", "needs by=N"),
        ("delay:x_ready,rank=1", "needs by=N above 0"),
        ("drop:x_ready,rank=-1", "rank of a fault must be at least 0"),
    ],
)
def test_wrong_names(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faults.parse(text)


def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyError), faults.plant("drop:x_ready,rank=1"):
        raise KeyError
    assert planted_faults == []


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["run", "--tokens", "48", "--ranks", "2", "--json"]
    assert cli.main([*small, "--fault", "drop:x_ready,rank=1,index=0"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert "nobody will publish x_ready[0]: rank 1, gate_up task 0.0" in report["error"]
    with pytest.raises(SystemExit, match="2"):
        cli.main([*small, "--fault", "drop:nothing,rank=1"])
    assert "needs an edge" in capsys.readouterr().err
    assert cli.main([*small, "--fault", "delay:x_ready,rank=1,by=20"]) == 0
