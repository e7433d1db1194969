"""Any sequence of calls on one workspace gives what each call gives alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import (
    SMALL_RING,
    assert_same,
    backward,
    build,
    forward,
    make_workload,
    recompute,
    run_both,
    same_bits,
    workspace_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKDeadlockError, MoKForwardContext, MoKSchedule, functional

NUM_RANKS = 3
CONFIG = MoKConfig(**SMALL_RING)
MODES = ["fused", "split", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down|combine"]
WORKLOADS = [
    make_workload([90, 0, 31], E=6, seed=1),
    make_workload([2, 120, 0], E=6, seed=2),
    make_workload([0, 0, 0], E=6, seed=3),
    make_workload([40, 50, 60], E=15, I=320, S=64, seed=4),
    make_workload([1, 0, 0], E=3, S=0, seed=5),
]
MOST_TOKENS = 120


def expected() -> list[list[dict[str, Tensor]]]:
    """Output and gradients of every workload alone, by rank."""
    if not _expected:
        _expected.extend(run_both(workload, CONFIG) for workload in WORKLOADS)
    return _expected


_expected: list[list[dict[str, Tensor]]] = []

indices = st.integers(0, len(WORKLOADS) - 1)
actions = st.one_of(
    st.tuples(st.just("build"), indices),
    st.tuples(st.just("forward"), indices, st.sampled_from(MODES), st.booleans()),
    st.tuples(st.just("forward"), indices, st.sampled_from(MODES), st.booleans()),
    st.tuples(st.just("backward"), indices, st.sampled_from(MODES)),
    st.tuples(st.just("backward"), indices, st.sampled_from(MODES)),
    st.tuples(st.just("recompute"), indices, st.sampled_from(MODES)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("grow"), st.integers(0, 40)),
    st.tuples(st.just("wrong ids"), st.integers(0, NUM_RANKS - 1)),
    st.tuples(st.just("lose"), st.sampled_from(["done", "published", "x_ready", "topk_ready"]), st.integers(0, 2)),
)


class Player:
    """Does the same actions on every rank."""

    def __init__(self, member: Any) -> None:
        self.rank = member.rank()
        self.workspace = workspace_for(WORKLOADS[0], member, CONFIG, num_local_tokens=MOST_TOKENS)
        self.schedules: dict[int, MoKSchedule] = {}
        self.contexts: dict[int, tuple[MoKSchedule, MoKForwardContext]] = {}

    def build(self, i: int) -> None:
        self.schedules[i] = build(WORKLOADS[i], self.workspace, CONFIG)

    def forward(self, i: int, mode: str, save_context: bool) -> None:
        """With the schedule that was built last for it, however long ago."""
        if i not in self.schedules:
            self.build(i)
        config = dataclasses.replace(CONFIG, mode=mode)
        output, context = forward(WORKLOADS[i], self.workspace, config, self.schedules[i], save_context=save_context)
        assert same_bits(output, expected()[i][self.rank]["output"])
        if save_context:
            self.contexts[i] = self.schedules[i], context

    def recompute(self, i: int, mode: str) -> None:
        if i not in self.schedules:
            self.build(i)
        config = dataclasses.replace(CONFIG, mode=mode)
        self.contexts[i] = (
            self.schedules[i],
            recompute(WORKLOADS[i], self.workspace, config, self.schedules[i]),
        )

    def backward(self, i: int, mode: str) -> None:
        """With the context that was made last for it, however long ago and however often it was used."""
        if i not in self.contexts:
            self.forward(i, mode, True)
        config = dataclasses.replace(CONFIG, mode=mode)
        found = backward(WORKLOADS[i], self.workspace, config, *self.contexts[i])
        assert_same(found, expected()[i][self.rank], without=("output",))

    def wrong_ids(self, at_rank: int) -> None:
        ids = WORKLOADS[0].expert_ids[self.rank] if self.rank != at_rank else torch.full((1, 2), 99)
        with pytest.raises((ValueError, RuntimeError)):
            functional.build_schedule(self.workspace, CONFIG, ids, num_local_experts=2)

    def lose(self, edge: str, at_rank: int) -> None:
        self.workspace.shared.lost_signals = [(edge, at_rank, -1, -1)]
        try:
            self.build(1)
            self.forward(1, "split", False)
        except MoKDeadlockError:
            self.schedules.pop(1, None)
            self.workspace.shared.lost_signals = []
            self.workspace.reset()
        else:
            assert edge == "x_ready"  # a rank without rows sends none
        self.workspace.shared.lost_signals = []


@given(st.lists(actions, min_size=1, max_size=14), st.sampled_from(["round_robin", "random", "last_first"]))
@settings(max_examples=80)
def test_any_sequence(sequence: list[tuple[Any, ...]], order: str) -> None:
    expected()

    def step(member: Any) -> None:
        player = Player(member)
        num_tokens = MOST_TOKENS
        for name, *arguments in sequence:
            if name == "reset":
                player.workspace.reset()
            elif name == "grow":
                num_tokens += arguments[0]
                player.workspace.grow(num_tokens)
            else:
                getattr(player, name.replace(" ", "_"))(*arguments)
        player.forward(0, "fused", True)
        player.backward(0, "split")

    LocalGroup(NUM_RANKS, order=order).run(step)
