"""Signals that never come, and ranks that make different calls: one clear error everywhere, then reset."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from helpers import FULL_RING, SMALL_RING, build, call, forward, make_workload, run, same_bits, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKDeadlockError, MoKPeerError, MoKTimeoutError
from mok_modular.targets import host
from mok_modular.testing import Workload

FIELDS = {"rank", "stage", "task", "edge", "index", "have", "want", "peer"}

PULL = ["input_ready", "done", "x_ready", "hidden_ready", "slot_free", "shared_hidden_ready", "shared_ready"]
PULL += ["published", "exited", "topk_ready", "ids_pushed", "ids_counted", "laid_out"]
SPLIT = [*PULL, "gate_up_ready", "y_ready"]
PUSH = [edge for edge in SPLIT if edge not in ("slot_free", "input_ready", "x_ready")]
PUSH += ["entered", "pushed", "x_arrived", "y_arrived"]

SETUPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fused": ({"mode": "fused", **SMALL_RING}, PULL),
    "split": ({"mode": "split", **SMALL_RING}, SPLIT),
    "mixed": ({"mode": "dispatch+gate_up|swiglu+down|combine", **SMALL_RING}, [*SPLIT]),
    "push and pull": ({"mode": "split", **FULL_RING, "dispatch": "push", "combine": "pull"}, PUSH),
    "fused push and pull": (
        {"mode": "fused", **FULL_RING, "dispatch": "push", "combine": "pull"},
        [edge for edge in PUSH if edge != "gate_up_ready"],
    ),
}

# What is counted on the way to another signal: the wait that is left over is for that one.
LEADS_TO = {
    "published": {"published", "input_ready", "done"},
    "exited": {"done"},
    "pushed": {"x_arrived"},
    "y_ready": {"y_ready", "y_arrived"},
    "ids_pushed": {"topk_ready"},
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


def cases() -> list[Any]:
    return [pytest.param(setup, edge, id=f"{setup}: {edge}") for setup, (_, edges) in SETUPS.items() for edge in edges]


def test_every_edge_is_lost_once() -> None:
    """Tickets are no signals. The end of a schedule has a test of its own."""
    tested = {edge for _, edges in SETUPS.values() for edge in edges} | {"schedule_exited"}
    assert set(host.extension().edge_names()) - tested == {"tickets", "schedule_tickets"}


def fail_and_recover(
    workload: Workload, config: MoKConfig, signal: tuple[str, int, int, int], **group: Any
) -> tuple[list[Exception], list[Tensor], list[float]]:
    """Every rank's error of a call with a lost signal; asserts that the workspace then wants a reset, and works."""
    outputs: list[Tensor] = []
    seconds: list[float] = []

    def step(member: Any) -> Exception:
        workspace = workspace_for(workload, member, config)
        shared = workspace.shared
        expected = call(workload, workspace, config)
        if member.rank() == 0:
            shared.lost_signals = [signal]
            run_calls = shared.run

            def run_and_look(calls: Any) -> Any:
                outputs.extend(c.tensors["output"] for c in calls if "output" in c.tensors)
                return run_calls(calls)

            shared.run = run_and_look
        start = time.monotonic()
        with pytest.raises(MoKTimeoutError) as caught:
            call(workload, workspace, config)
        seconds.append(time.monotonic() - start)
        for attempt in (build, lambda *args: call(*args)):
            with pytest.raises(RuntimeError, match=r"an earlier call on this workspace failed.*reset\(\)"):
                attempt(workload, workspace, config)
        with pytest.raises(type(caught.value)):
            workspace.check()
        shared.lost_signals = []
        workspace.reset()
        workspace.check()
        for _ in range(3):  # both banks and both parities
            assert same_bits(call(workload, workspace, config), expected)
        return caught.value

    group.setdefault("num_workers", 4)
    return LocalGroup(workload.num_ranks, **group).run(step), outputs, seconds


def check_error(error: Exception, signal: tuple[str, int, int, int]) -> None:
    edge, at_rank, _, _ = signal
    edges = LEADS_TO.get(edge, {edge})
    assert isinstance(error, MoKTimeoutError)
    assert error.waits
    for wait in error.waits:
        assert wait.keys() >= FIELDS
        assert isinstance(wait["have"], int)
        assert wait["have"] != wait["want"]
    # The culprit: the first line names the edge that nobody will publish, who waits for it, and for whom.
    first = str(error).splitlines()[0]
    culprits = [
        wait
        for wait in error.waits
        if wait["edge"] in edges
        and (wait["peer"] if wait["peer"] >= 0 else wait["rank"]) == at_rank
        and f"nobody will publish {wait['edge']}[{wait['index']}]: rank {wait['rank']}, {wait['stage']} task "
        f"{wait['task']}, waits for rank {at_rank}, has {wait['have']} and wants {wait['want']}"
        in first
    ]
    assert culprits, str(error)


@pytest.mark.parametrize(("setup", "edge"), cases())
def test_a_lost_signal_is_a_deadlock(workload: Workload, setup: str, edge: str) -> None:
    options, _ = SETUPS[setup]
    signal = (edge, 1, -1, -1)
    errors, outputs, _ = fail_and_recover(workload, MoKConfig(**options), signal)
    for error in errors:
        assert type(error) is MoKDeadlockError
        check_error(error, signal)
    if edge in ("topk_ready", "ids_pushed", "ids_counted", "laid_out"):
        return
    # A rank that waited for something left NaN; one that was through has its output.
    assert isinstance(errors[0], MoKDeadlockError)
    waiting = {wait["rank"] for wait in errors[0].waits}
    for rank, output in enumerate(outputs[:2]):
        assert output.isnan().all() or (rank not in waiting and output.isfinite().all())


@pytest.mark.parametrize(
    "order", [{"order": "random", "seed": 5}, {"order": "last_first"}, {"num_workers": 1}], ids=str
)
@pytest.mark.parametrize("edge", SPLIT)
def test_in_any_order(workload: Workload, edge: str, order: dict[str, Any]) -> None:
    signal = (edge, 0, -1, -1)
    errors, _, _ = fail_and_recover(workload, MoKConfig(mode="split", **SMALL_RING), signal, **order)
    for error in errors:
        assert type(error) is MoKDeadlockError
        check_error(error, signal)


def test_a_single_lost_word_and_a_single_lost_index(workload: Workload) -> None:
    """One destination rank, one row block: the waits say which."""
    config = MoKConfig(mode="split", **SMALL_RING)
    (error, _), _, _ = fail_and_recover(workload, config, ("input_ready", 1, 0, -1))
    assert isinstance(error, MoKDeadlockError)
    assert {wait["rank"] for wait in error.waits if wait["edge"] == "input_ready"} == {0}
    check_error(error, ("input_ready", 1, 0, -1))
    (error, _), _, _ = fail_and_recover(workload, config, ("x_ready", 0, -1, 2))
    assert isinstance(error, MoKDeadlockError)
    assert {wait["index"] for wait in error.waits if wait["edge"] == "x_ready"} == {2}
    assert "nobody will publish x_ready[2]" in str(error)


@pytest.mark.parametrize("edge", ["input_ready", "done", "x_ready", "slot_free", "hidden_ready", "topk_ready"])
def test_a_lost_signal_is_a_timeout_on_threads(workload: Workload, edge: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0.3, start_timeout_s=0.3)
    signal = (edge, 1, -1, -1)
    errors, _, seconds = fail_and_recover(workload, config, signal, executor="threads")
    for error in errors:
        assert type(error) is MoKTimeoutError
        assert "timeout_s=0.3" in str(error)
        check_error(error, signal)
    assert max(seconds) < 5  # 0.3 s, and generous room for a busy machine


def test_threads_time_out_by_the_configured_limit(workload: Workload) -> None:
    """input_ready may take start_timeout_s, everything inside the call timeout_s."""
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=60, start_timeout_s=0.2)
    errors, _, _ = fail_and_recover(workload, config, ("input_ready", 1, -1, -1), executor="threads")
    assert "start_timeout_s=0.2" in str(errors[0])


def test_a_rank_that_misses_the_end_of_a_schedule(workload: Workload) -> None:
    """Nobody waits for it, but the rank is one call behind, and the next call sees that."""
    config = MoKConfig(**SMALL_RING)
    expected = run(workload, config)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        workspace.shared.lost_signals = [("schedule_exited", 1, -1, -1)]
        schedule = build(workload, workspace, config)
        workspace.shared.lost_signals = []
        with pytest.raises(MoKPeerError, match="forward: ranks are not at the same call"):
            forward(workload, workspace, config, schedule)
        workspace.reset()
        return call(workload, workspace, config)

    assert same_bits(torch.cat(LocalGroup(2).run(step)), expected)


def test_orders_differ_and_seeds_repeat(workload: Workload) -> None:
    """What results do not depend on does change: who was where when nobody could go on."""

    def waits(**options: Any) -> list[tuple[Any, ...]]:
        config = MoKConfig(mode="fused", **SMALL_RING)
        (error, _), _, _ = fail_and_recover(workload, config, ("slot_free", 1, -1, -1), **options)
        assert isinstance(error, MoKDeadlockError)
        return [(wait["rank"], wait["worker"], wait["stage"], wait["task"]) for wait in error.waits]

    found = [waits(order="random", seed=seed) for seed in (1, 2, 3)]
    assert len({tuple(each) for each in found}) > 1
    assert waits(order="random", seed=2) == found[1]


def test_reset_is_allowed_at_any_time(workload: Workload) -> None:
    """Before the first call, between schedule and forward, twice in a row."""
    config = MoKConfig(**SMALL_RING)
    expected = run(workload, config)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        workspace.reset()
        workspace.reset()
        schedule = build(workload, workspace, config)
        workspace.reset()
        output, _ = forward(workload, workspace, config, schedule)
        workspace.reset()
        assert same_bits(call(workload, workspace, config), output)
        return output

    assert same_bits(torch.cat(LocalGroup(2).run(step)), expected)


def test_another_workspace_is_not_affected(workload: Workload) -> None:
    config = MoKConfig(**SMALL_RING)

    def step(member: Any) -> None:
        broken, other = (workspace_for(workload, member, config) for _ in range(2))
        expected = call(workload, other, config)
        broken.shared.lost_signals = [("done", 0, -1, -1)]
        with pytest.raises(MoKDeadlockError):
            call(workload, broken, config)
        assert same_bits(call(workload, other, config), expected)

    LocalGroup(2).run(step)


# ---- ranks that make different calls ----


def mismatch(workload: Workload, config: MoKConfig, attempts: list[Any]) -> list[Exception]:
    """Rank r makes attempts[r](workspace, schedule); returns every rank's error. After reset the next call is right."""
    expected = run(workload, config)
    errors: list[Any] = [None] * len(attempts)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        with pytest.raises((MoKPeerError, ValueError)) as caught:
            attempts[member.rank()](workspace, schedule)
        errors[member.rank()] = caught.value
        workspace.reset()
        return call(workload, workspace, config)

    assert same_bits(torch.cat(LocalGroup(len(attempts)).run(step)), expected)
    return errors


def test_schedule_against_forward(workload: Workload) -> None:
    config = MoKConfig(**SMALL_RING)
    errors = mismatch(
        workload,
        config,
        [
            lambda workspace, schedule: build(workload, workspace, config),
            lambda workspace, schedule: forward(workload, workspace, config, schedule),
        ],
    )
    for error in errors:
        assert type(error) is MoKPeerError
        assert "rank 0: build_schedule, rank 1: forward" in str(error)


@pytest.mark.parametrize("mode", ["fused", "split"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "dispatch|gate_up+swiglu|down+combine"}, ["mode", "down+combine"]),
        ({"I": 320}, ["intermediate_size", "128", "320"]),
        ({"S": 64}, ["shared_size", "192", "64"]),
        ({"S": 2048}, ["shared_size", "192", "2048"]),
        ({"S": 0}, ["shared_size", "192", "0"]),
        ({"swiglu_limit": 7.0}, ["swiglu_limit", "None", "7.0"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("other_rank", [0, 1])
def test_forward_against_another_forward(
    workload: Workload, mode: str, change: dict[str, Any], words: list[str], other_rank: int
) -> None:
    """The regions have room for the larger of the two until the difference is seen."""
    config = MoKConfig(mode=mode, **SMALL_RING)
    sizes = {"E": 6, "K": 3, **{name: value for name, value in change.items() if name != "mode"}}
    other = make_workload([150, 140], **sizes)
    other_config = dataclasses.replace(config, mode=change.get("mode", mode))
    attempts = [lambda workspace, schedule: forward(workload, workspace, config, schedule)] * 2
    attempts[other_rank] = lambda workspace, schedule: forward(other, workspace, other_config, schedule)
    for error in mismatch(workload, config, attempts):
        assert type(error) is MoKPeerError
        for word in ["ranks differ in", *words]:
            assert word in str(error)


def test_schedules_for_different_numbers_of_experts(workload: Workload) -> None:
    config = MoKConfig(**SMALL_RING)
    wider = make_workload([150, 140], E=600, K=3)
    errors = mismatch(
        workload,
        config,
        [
            lambda workspace, schedule: build(workload, workspace, config),
            lambda workspace, schedule: build(wider, workspace, config),
        ],
    )
    for error in errors:
        assert "num_local_experts (rank 0: 3, rank 1: 300)" in str(error)


def test_fingerprints_that_collide_are_told_apart(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits travel; two different calls with the same ones must not run into each other's memory."""
    monkeypatch.setattr(host.Call, "fingerprint", lambda self: 7)
    config = MoKConfig(**SMALL_RING)
    wider = make_workload([150, 140], E=600, K=3)
    errors = mismatch(
        workload,
        config,
        [
            lambda workspace, schedule: build(workload, workspace, config),
            lambda workspace, schedule: build(wider, workspace, config),
        ],
    )
    assert "num_local_experts (rank 0: 3, rank 1: 300)" in str(errors[1])


def test_equal_values_of_different_types_agree(workload: Workload) -> None:
    config = MoKConfig(schedule_capacity_multiplier=2.0, **SMALL_RING)
    same = dataclasses.replace(config, schedule_capacity_multiplier=2)
    limited = dataclasses.replace(workload, swiglu_limit=7.0)
    other = dataclasses.replace(workload, swiglu_limit=7)

    def step(member: Any) -> None:
        rank = member.rank()
        workspace = workspace_for(workload, member, (config, same)[rank])
        schedule = build(workload, workspace, (config, same)[rank])
        forward((limited, other)[rank], workspace, (config, same)[rank], schedule)

    LocalGroup(2).run(step)


@pytest.mark.parametrize(
    "attempt",
    [
        lambda workspace, schedule: workspace.reset(),
        lambda workspace, schedule: workspace.grow(500),
        lambda workspace, schedule: workspace_for(make_workload([1, 1], K=3), workspace.member, MoKConfig()),
    ],
    ids=["reset", "grow", "create_workspace"],
)
@pytest.mark.parametrize("other_rank", [0, 1])
def test_other_collective_calls_against_forward(workload: Workload, attempt: Any, other_rank: int) -> None:
    config = MoKConfig(**SMALL_RING)
    attempts = [lambda workspace, schedule: forward(workload, workspace, config, schedule)] * 2
    attempts[other_rank] = attempt
    for error in mismatch(workload, config, attempts):
        assert type(error) is MoKPeerError
        assert "ranks make different calls at the same time" in str(error)
        assert f"rank {1 - other_rank}: forward" in str(error)


def test_different_workspaces(workload: Workload) -> None:
    config = MoKConfig(**SMALL_RING)
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        workspaces = [workspace_for(workload, member, config, num_local_tokens=n) for n in (150, 160)]
        with pytest.raises(ValueError) as caught:
            build(workload, workspaces[member.rank()], config)
        seen[member.rank()] = caught.value
        for workspace in workspaces:
            call(workload, workspace, config)

    LocalGroup(2).run(step)
    for error in seen.values():
        assert "another workspace" in str(error)
        assert "num_local_tokens=150" in str(error)
        assert "num_local_tokens=160" in str(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_local_tokens": 9}, ["num_local_tokens must be the same on every rank", "rank 0: 5, rank 1: 9"]),
        ({"hidden_size": 128}, ["hidden_size must be the same on every rank", "rank 0: 64, rank 1: 128"]),
        ({"topk": 3}, ["topk must be the same on every rank", "rank 0: 2, rank 1: 3"]),
        ({"config": MoKConfig(ring="serial")}, ["config must be the same on every rank", "serial"]),
    ],
    ids=str,
)
def test_workspaces_that_differ(options: dict[str, Any], words: list[str]) -> None:
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        from mok_modular import functional

        sizes = {"config": MoKConfig(), "num_local_tokens": 5, "hidden_size": 64, "topk": 2}
        with pytest.raises(ValueError) as caught:
            functional.create_workspace(group=member, **{**sizes, **(options if member.rank() == 1 else {})})
        seen[member.rank()] = caught.value
        functional.create_workspace(group=member, **sizes)

    LocalGroup(2).run(step)
    for rank in range(2):
        for word in words:
            assert word in str(seen[rank])
