"""Same inputs, same bits: over plans, ranks, orders, executors, workers, ring sizes and every ablation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FULL_RING, SMALL_RING, assert_right, make_workload, regroup, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok_modular import MoKConfig
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload

PLANS = [str(plan) for plan in all_plans()]
SOME_PLANS = ["fused", "split", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down|combine"]
NUM_TOKENS = [150, 3, 0, 247]  # over 4 ranks; the rows of a rank make several macrobatches of 256


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload(NUM_TOKENS, K=3, seed=1)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> Tensor:
    """The fused plan with default settings, which is right."""
    output = run(workload)
    assert_right(workload, output)
    return output


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ring", [SMALL_RING, FULL_RING], ids=["small ring", "full ring"])
def test_plans(workload: Workload, expected: Tensor, plan: str, ring: dict[str, int]) -> None:
    assert same_bits(run(workload, MoKConfig(mode=plan, **ring)), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks(workload: Workload, expected: Tensor, plan: str, num_ranks: int) -> None:
    assert same_bits(run(regroup(workload, num_ranks), MoKConfig(mode=plan, **SMALL_RING)), expected)


@pytest.mark.parametrize("seed", range(12))
def test_random_orders(workload: Workload, expected: Tensor, seed: int) -> None:
    config = MoKConfig(mode=PLANS[5 * seed % 16], **SMALL_RING)
    assert same_bits(run(workload, config, order="random", seed=seed), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("order", ["round_robin", "last_first"])
def test_workers(workload: Workload, expected: Tensor, plan: str, num_workers: int, order: str) -> None:
    config = MoKConfig(mode=plan, **SMALL_RING)
    assert same_bits(run(workload, config, num_workers=num_workers, order=order), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("options", [SMALL_RING, {**FULL_RING, "dispatch": "push", "combine": "pull"}], ids=str)
def test_threads(workload: Workload, expected: Tensor, plan: str, num_workers: int, options: dict[str, Any]) -> None:
    config = MoKConfig(mode=plan, **options)
    assert same_bits(run(workload, config, executor="threads", num_workers=num_workers), expected)


ABLATIONS: list[dict[str, Any]] = [
    {"minibatch_size": 128, "macrobatch_size": 128},
    {"minibatch_size": 384, "macrobatch_size": 384},
    {"minibatch_size": 128, "macrobatch_size": 640},
    {"minibatch_size": 4096, "macrobatch_size": 131072},
    {**SMALL_RING, "ring": "serial"},
    {**SMALL_RING, "signal_grain": "minibatch"},
    {"minibatch_size": 256, "macrobatch_size": 512, "signal_grain": "minibatch", "ring": "serial"},
    {"minibatch_size": 256, "macrobatch_size": 256, "row_block": 256},
    {"minibatch_size": 512, "macrobatch_size": 1024, "row_block": 256, "signal_grain": "minibatch"},
    {**SMALL_RING, "fwd_num_comm_sms": 1},
    {**SMALL_RING, "fwd_num_comm_sms": 7},
    {**SMALL_RING, "schedule_capacity_multiplier": 4.0},
    {**FULL_RING, "dispatch": "push"},
    {**FULL_RING, "dispatch": "pull_once"},
    {**FULL_RING, "dispatch": "pull_once", "signal_grain": "minibatch"},
    {**FULL_RING, "dispatch": "pull_once", "combine": "pull", "row_block": 256},
    {**FULL_RING, "combine": "pull"},
    {**FULL_RING, "dispatch": "push", "combine": "pull"},
    {**FULL_RING, "dispatch": "push", "combine": "pull", "signal_grain": "minibatch"},
    {**FULL_RING, "dispatch": "push", "combine": "pull", "row_block": 256, "ring": "serial"},
]


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
@pytest.mark.parametrize("save_context", [False, True], ids=["no context", "context"])
def test_ablations(
    workload: Workload, expected: Tensor, plan: str, options: dict[str, Any], save_context: bool
) -> None:
    assert same_bits(run(workload, MoKConfig(mode=plan, **options), save_context=save_context), expected)


def test_ids_of_either_width(workload: Workload, expected: Tensor) -> None:
    for dtype in (torch.int32, torch.int64):
        ids = [part.to(dtype) for part in workload.expert_ids]
        assert same_bits(run(Workload(**{**vars(workload), "expert_ids": ids})), expected)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, list[dict[str, Any]], list[dict[str, Any]]]:
    """A workload, and two choices of config and group that must not matter."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    sizes = {
        "E": num_ranks * draw(st.integers(1, 5)),
        "K": draw(st.sampled_from([1, 2, 3, 5])),
        "H": 64 * draw(st.integers(1, 3)),
        "I": 64 * draw(st.integers(1, 3)),
        "S": 64 * draw(st.integers(0, 2)),
    }
    num_tokens = [draw(st.sampled_from([0, 1, 7, 31, 33, 130, 260])) for _ in range(num_ranks)]
    kind = draw(st.sampled_from(["uniform", "one expert", "one rank", "sparse", "skewed"]))

    def routing(rank: int, count: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(0, sizes["E"], (count, sizes["K"]), generator=generator)
        if kind == "one expert":
            ids.fill_(sizes["E"] - 1)
        if kind == "one rank":
            ids %= sizes["E"] // num_ranks
        if kind == "sparse":
            ids[torch.rand(ids.shape, generator=generator) < 0.8] = -1
        if kind == "skewed":
            ids = ids * ids // sizes["E"]
        return ids

    limit = draw(st.sampled_from([None, 0.0, 0.7, 20.0]))
    seed = draw(st.integers(0, 1000))
    workload = make_workload(num_tokens, routing=routing, seed=seed, swiglu_limit=limit, **sizes)
    configs, groups = [], []
    for _ in range(2):
        row_block = draw(st.sampled_from([128, 256]))
        minibatch = row_block * draw(st.integers(1, 3))
        config = {
            "mode": draw(st.sampled_from(PLANS)),
            "row_block": row_block,
            "minibatch_size": minibatch,
            "macrobatch_size": minibatch * draw(st.integers(1, 3)),
            "signal_grain": draw(st.sampled_from(["row_block", "minibatch"])),
            "ring": draw(st.sampled_from(["interleaved", "serial"])),
        }
        if draw(st.booleans()):
            config["macrobatch_size"] = 64 * minibatch
            config["dispatch"] = draw(st.sampled_from(["pull", "pull_once", "push"]))
            config["combine"] = draw(st.sampled_from(["pull", "push"]))
        configs.append(config)
        groups.append(
            {
                "order": draw(st.sampled_from(["round_robin", "random", "last_first"])),
                "seed": draw(st.integers(0, 2**32)),
                "num_workers": draw(st.integers(1, 6)),
            }
        )
    return workload, configs, groups


@given(problems())
@settings(max_examples=120)
def test_any_problem(problem: tuple[Workload, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    workload, configs, groups = problem
    outputs = [
        run(workload, MoKConfig(**config), save_context=i == 1, **group)
        for i, (config, group) in enumerate(zip(configs, groups, strict=True))
    ]
    assert_right(workload, outputs[0])
    assert same_bits(outputs[0], outputs[1])
    assert same_bits(run(regroup(workload, 1), MoKConfig(**configs[1])), outputs[0])
