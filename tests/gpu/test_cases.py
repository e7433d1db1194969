"""What users of such libraries reported, on a GPU: counts, experts, ids and layouts, numbers, large offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
from helpers import SMALL_RING, assert_right, make_workload, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, functional
from mok_modular.testing import Workload

DEVICE = "cuda:0"
SPLIT = MoKConfig(mode="split", **SMALL_RING)


def run(workload: Workload, config: MoKConfig = SPLIT, *, device: str = DEVICE) -> Tensor:
    """Outputs of all ranks, looked at and on the CPU, with the context kept."""
    workload = workload.to(device)

    def step(member: Any) -> Tensor:
        workspace = helpers.workspace_for(workload, member, config)
        output = helpers.call(workload, workspace, config)
        workspace.check()
        return output

    return torch.cat(LocalGroup(workload.num_ranks, device=device).run(step)).cpu()


def constant(*choices: int) -> Callable[[int, int, torch.Generator], Tensor]:
    """Every token has these experts."""
    return lambda rank, count, generator: torch.tensor(choices).expand(count, len(choices)).contiguous()


@pytest.mark.parametrize(
    "num_tokens", [[0, 40], [40, 0], [0, 0, 0, 0], [1], [4095], [672, 1], [5, 5000], [3, 14, 159, 26]], ids=str
)
def test_counts(num_tokens: list[int]) -> None:
    workload = make_workload(num_tokens)
    output = run(workload)
    if sum(num_tokens):
        assert_right(workload, output)
        assert same_bits(output, run(helpers.regroup(workload, 1)))
    assert output.shape == (sum(num_tokens), workload.shape.hidden_size)


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("one expert", constant(3, 3)),
        ("one rank", constant(6, 7)),
        ("hot experts spread", constant(0, 4)),
        ("same expert twice", lambda rank, count, g: torch.randint(0, 8, (count, 1), generator=g).repeat(1, 2)),
        ("no routes", constant(-1, -1)),
        ("no rows for rank 0", lambda rank, count, g: torch.randint(4, 8, (count, 2), generator=g)),
    ],
)
@pytest.mark.parametrize("has_shared", [True, False])
def test_routings(name: str, routing: Any, has_shared: bool) -> None:
    workload = make_workload([150, 301], routing=routing, S=192 if has_shared else 0)
    output = run(workload)
    if name != "no routes" or has_shared:
        assert_right(workload, output)
    else:
        assert not output.any()


@pytest.mark.parametrize(
    "sizes",
    [
        {"E": 64, "K": 6},  # 32 a rank
        {"E": 512, "K": 10},
        {"E": 2, "K": 1},  # one a rank
        {"K": 1},
        {"K": 8},
        {"E": 32, "K": 22},
        {"H": 2880, "I": 640, "S": 0},
        {"H": 768, "I": 64},
        {"H": 8192, "I": 192, "S": 64},
    ],
    ids=str,
)
def test_sizes(sizes: dict[str, int]) -> None:
    workload = make_workload([90, 33], **sizes)
    assert_right(workload, run(workload))


def test_ids_of_both_types() -> None:
    workload = make_workload([77, 20])
    narrow = dataclasses.replace(workload, expert_ids=[ids.int() for ids in workload.expert_ids])
    assert same_bits(run(workload), run(narrow))


def test_wrong_types_and_layouts_are_named() -> None:
    workload = make_workload([32]).to(DEVICE)
    member = LocalGroup(1, device=DEVICE).members[0]
    workspace = helpers.workspace_for(workload, member, SPLIT)
    ids = workload.expert_ids[0]

    def build(ids: Tensor) -> Any:
        return functional.build_schedule(workspace, SPLIT, ids, num_local_experts=8)

    with pytest.raises(TypeError, match=r"top_experts must be torch.int32 or torch.int64, got torch.float32"):
        build(ids.float())
    with pytest.raises(ValueError, match="top_experts must be contiguous"):
        build(ids.t().contiguous().t())
    with pytest.raises(ValueError, match="top_experts must be on the workspace's device, cuda:0, got cpu"):
        build(ids.cpu())
    with pytest.raises(ValueError, match="top_experts has 33 tokens, the workspace has room for num_local_tokens = 32"):
        build(torch.zeros(33, 2, dtype=torch.int32, device=DEVICE))
    schedule = build(ids)

    def forward(x: Tensor) -> Any:
        return functional.forward(
            SPLIT, workspace, schedule, x, workload.router_weights[0], *helpers.weights_of(workload, member)
        )

    x = workload.x[0]
    for wrong in (x.half(), x.float()):
        with pytest.raises(TypeError, match=f"x must be torch.bfloat16, got {wrong.dtype}"):
            forward(wrong)
    with pytest.raises(ValueError, match="x must be contiguous"):
        forward(x.t().contiguous().t())
    with pytest.raises(ValueError, match="x must be on the workspace's device"):
        forward(x.cpu())
    assert_right(make_workload([32]), forward(x)[0].cpu())


def test_more_rows_than_the_capacity_are_told() -> None:
    workload = make_workload([200, 200], routing=constant(0, 1))
    config = dataclasses.replace(SPLIT, schedule_capacity_multiplier=1.0)
    with pytest.raises(ValueError, match=r"rows come to rank 0, but schedule_capacity_multiplier=1\.0 leaves room for"):
        run(workload, config)


def test_router_weights_of_zero_negative_and_tiny() -> None:
    workload = make_workload([60])
    weights = [torch.tensor([[0.0, -1.5]]).repeat(60, 1)]
    weights[0][::3] = 1e-30
    workload = dataclasses.replace(workload, router_weights=weights)
    assert_right(workload, run(workload))


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_swiglu_limit(limit: float) -> None:
    workload = make_workload([130, 20], swiglu_limit=limit)
    output = run(workload)
    assert_right(workload, output) if limit else None
    for plan in ("dispatch|gate_up+swiglu|down|combine", "dispatch|gate_up+swiglu|down+combine"):
        assert same_bits(output, run(workload, MoKConfig(mode=plan, **SMALL_RING)))


def test_deterministic_algorithms_change_nothing() -> None:
    workload = make_workload([100, 37])
    base = run(workload)
    torch.use_deterministic_algorithms(True)
    try:
        assert same_bits(base, run(workload))
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_never_leaks() -> None:
    """Rows behind a segment are NaN in the ring before; a pusher does not clear them."""
    workload = make_workload([70, 70], E=8, K=2)
    base = run(workload)
    for options in ({}, {"dispatch": "push"}, {"combine": "pull"}):
        config = MoKConfig(mode="split", minibatch_size=256, **options)
        assert same_bits(base, run(workload, config))


def test_offsets_beyond_2_to_the_31() -> None:
    """A ring of more than 2^31 elements, whose last rows are used."""
    num_tokens, topk, hidden = 48_128, 8, 7168
    workload = make_workload([256], H=hidden, I=64, E=8, K=topk, S=0)
    base = run(workload)
    workload = workload.to(DEVICE)
    config = MoKConfig(mode="split", macrobatch_size=1 << 20, minibatch_size=4096)
    member = LocalGroup(1, device=DEVICE).members[0]
    workspace = functional.create_workspace(config, member, num_local_tokens=num_tokens, hidden_size=hidden, topk=topk)
    copies = num_tokens // 256
    x = workload.x[0].repeat(copies, 1)
    ids, weights = workload.expert_ids[0].repeat(copies, 1), workload.router_weights[0].repeat(copies, 1)
    schedule = functional.build_schedule(workspace, config, ids, num_local_experts=8)
    output, _ = functional.forward(
        config, workspace, schedule, x, weights, *helpers.weights_of(workload, member), save_context=False
    )
    workspace.check()
    assert schedule.num_rows * hidden > 2**31
    output = output.cpu()
    for i in (0, copies // 2, copies - 1):
        assert same_bits(output[i * 256 : (i + 1) * 256], base)
