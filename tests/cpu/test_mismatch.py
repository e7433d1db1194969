"""Ranks that make different calls: one clear error on every rank, and after reset the next call is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, build, call, forward, make_workload, run, same_bits, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError
from mok_modular.protocol.call import Call
from mok_modular.testing import Workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


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


def test_an_old_schedule_against_a_new_one(workload: Workload) -> None:
    """Rows of one build at an owner that counts on another would be wrong without a sign of it."""
    config = MoKConfig(**SMALL_RING)

    def old(workspace: Any, schedule: Any) -> None:
        build(workload, workspace, config)
        forward(workload, workspace, config, schedule)

    def new(workspace: Any, schedule: Any) -> None:
        forward(workload, workspace, config, build(workload, workspace, config))

    for error in mismatch(workload, config, [old, new]):
        assert type(error) is MoKPeerError
        assert "schedule (rank 0: 1, rank 1: 2)" in str(error)


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
    monkeypatch.setattr(Call, "fingerprint", lambda self: 7)
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
