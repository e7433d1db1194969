"""mok.functional: the context that forward keeps, and arguments that are refused before anything is launched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import (
    FULL_RING,
    SMALL_RING,
    all_ranks,
    assert_right,
    build,
    call,
    forward,
    make_workload,
    run,
    same_bits,
    weights_of,
    workspace_for,
)
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKForwardContext, MoKPeerError, MoKSchedule, functional
from mok_modular.testing import Workload

MODES = ["fused", "split", "dispatch|gate_up+swiglu|down+combine"]
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")


# ---- the context ----


def expected_context(workload: Workload, schedule: MoKSchedule, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate and up of all rows of a rank in plain torch; zeros in padding."""
    mine = workload.weights.of_rank(rank, workload.num_ranks)
    num_rows, (inter, hidden) = schedule.num_rows, mine.routed_gate.shape[1:]
    x = torch.zeros(num_rows, hidden, dtype=torch.bfloat16)
    gate, up = (torch.zeros(num_rows, inter, dtype=torch.bfloat16) for _ in range(2))
    for row in range(num_rows):
        src_rank, route = int(schedule.peer_rank[row]), int(schedule.peer_token_idx[row])
        if src_rank < 0:
            continue
        expert = int(workload.expert_ids[src_rank].flatten()[route]) - rank * len(mine.routed_gate)
        assert schedule.segment_start[expert] <= row < schedule.segment_start[expert + 1]
        x[row] = workload.x[src_rank][route // workload.shape.topk]
        gate[row] = mine.routed_gate[expert] @ x[row]
        up[row] = mine.routed_up[expert] @ x[row]
    return x, gate, up


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        SMALL_RING,
        FULL_RING,
        {**FULL_RING, "dispatch": "push"},
        {**FULL_RING, "dispatch": "pull_once"},
        {**SMALL_RING, "ring": "serial"},
    ],
    ids=str,
)
def test_context_of_macrobatch_0(mode: str, options: dict[str, Any]) -> None:
    workload = make_workload([150, 40], E=6, K=3)
    config = MoKConfig(mode=mode, **options)

    def step(workspace: functional.Workspace) -> tuple[MoKSchedule, MoKForwardContext, Tensor]:
        schedule = build(workload, workspace, config)
        # Whatever an earlier call left in the ring must not show.
        other = dataclasses.replace(workload, x=[torch.full_like(x, float("nan")) for x in workload.x])
        forward(other, workspace, config, schedule)
        output, context = forward(workload, workspace, config, schedule)
        return schedule, context, output

    results = all_ranks(workload, config, step)
    for rank, (schedule, context, _) in enumerate(results):
        num_rows, num_ring = schedule.num_rows, min(config.macrobatch_size, schedule.peer_rank.numel())
        kept = min(num_rows, num_ring)
        assert num_rows > 256  # more than one macrobatch of the small ring
        assert context.x.shape == (num_ring, 64)
        assert context.gate.shape == context.up.shape == (num_ring, 128)
        rows, gate, up = expected_context(workload, schedule, rank)
        assert torch.equal(context.x[:kept], rows[:kept])
        torch.testing.assert_close(context.gate[:kept], gate[:kept], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(context.up[:kept], up[:kept], rtol=2**-7, atol=2**-9)
        padding = schedule.peer_rank[:kept] < 0
        assert padding.any()
        for part in (context.x, context.gate, context.up):
            assert not part[:kept][padding].any()
        for part, weight in ((context.shared_gate, "shared_gate"), (context.shared_up, "shared_up")):
            expected = workload.x[rank] @ getattr(workload.weights, weight).t()
            torch.testing.assert_close(part, expected, rtol=2**-7, atol=2**-9)
    assert_right(workload, torch.cat([output for _, _, output in results]))


def test_context_is_optional_and_its_own_tensors() -> None:
    workload = make_workload([50, 9])
    config = MoKConfig(**SMALL_RING)

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        output, none = forward(workload, workspace, config, schedule, save_context=False)
        assert all(getattr(none, item.name).numel() == 0 for item in dataclasses.fields(none))
        again, context = forward(workload, workspace, config, schedule)
        assert same_bits(again, output)
        before = [getattr(context, item.name).clone() for item in dataclasses.fields(context)]
        _, second = forward(workload, workspace, config, schedule)
        forward(dataclasses.replace(workload, x=[-x for x in workload.x]), workspace, config, schedule)
        for old, item in zip(before, dataclasses.fields(context), strict=True):
            assert same_bits(getattr(context, item.name), old)
            # The rows that no schedule reached are not written, and need not agree.
            kept = slice(0, schedule.num_rows)
            assert same_bits(getattr(second, item.name)[kept], old[kept])

    all_ranks(workload, config, step)


def test_schedule_and_context_are_rebuilt_from_their_fields() -> None:
    workload = make_workload([30, 20])
    config = MoKConfig()

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        assert all(isinstance(tensor, Tensor) for tensor in schedule.tensors().values())
        rebuilt = type(schedule)(**schedule.tensors())
        output, context = forward(workload, workspace, config, schedule)
        assert same_bits(forward(workload, workspace, config, rebuilt)[0], output)
        type(context)(**{item.name: getattr(context, item.name) for item in dataclasses.fields(context)})

    all_ranks(workload, config, step)


# ---- what is refused ----


def test_capacity_overflow_names_have_and_want_on_its_rank() -> None:
    """Nothing is written out of bounds, and the next call works."""
    crowded = make_workload([300, 300], routing=lambda rank, count, _: torch.full((count, 2), 5))
    even = make_workload([300, 300])
    config = MoKConfig(schedule_capacity_multiplier=1.0, **SMALL_RING)
    seen: dict[int, Exception] = {}

    def step(member: Any) -> Tensor:
        workspace = workspace_for(even, member, config)
        with pytest.raises((ValueError, MoKPeerError)) as caught:
            build(crowded, workspace, config)
        seen[member.rank()] = caught.value
        return call(even, workspace, config)

    assert_right(even, torch.cat(LocalGroup(2).run(step)))
    assert type(seen[1]) is ValueError
    # 1200 routes to one expert make 1280 rows; an even share is 600 routes, and 4 experts have 4 paddings.
    for word in ("1280 rows come to rank 1", "schedule_capacity_multiplier=1.0", "leaves room for 1024"):
        assert word in str(seen[1])
    assert type(seen[0]) is MoKPeerError
    assert seen[0].rank == 1
    assert str(seen[1]) in str(seen[0])


def test_every_overflowing_rank_hears_its_own_numbers() -> None:
    routing = lambda rank, count, _: torch.tensor([0, 4]).expand(count, 2).contiguous()  # noqa: E731
    workload = make_workload([300, 300], routing=routing)
    config = MoKConfig(schedule_capacity_multiplier=0.1, **SMALL_RING)
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        try:
            build(workload, workspace, config)
        except Exception as error:
            seen[member.rank()] = error

    LocalGroup(2).run(step)
    for rank in range(2):
        assert type(seen[rank]) is ValueError
        assert f"640 rows come to rank {rank}" in str(seen[rank])


@pytest.mark.parametrize("option", [{"dispatch": "push"}, {"dispatch": "pull_once"}, {"combine": "pull"}], ids=str)
def test_push_dispatch_and_pull_combine_need_the_whole_ring(option: dict[str, str]) -> None:
    workload = make_workload([400])
    config = MoKConfig(**SMALL_RING, **option)
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' needs a ring that holds all rows: macrobatch_size is 256"):
        run(workload, config)


def taken_apart(schedule: MoKSchedule, **fields: Tensor) -> MoKSchedule:
    return dataclasses.replace(schedule, **fields)


def wrong_arguments() -> list[Any]:
    """(argument, what to make of it, error, words)"""
    cases: list[tuple[str, Any, type[Exception], list[str]]] = [
        ("x", lambda x: x.t().contiguous().t(), ValueError, ["x must be contiguous", "strides"]),
        ("x", lambda x: None, TypeError, ["x must be a tensor", "NoneType"]),
        ("x", lambda x: x.to("meta"), ValueError, ["x must be on", "cpu", "meta"]),
        ("router_weights", lambda w: w[:, ::2], ValueError, ["router_weights must be contiguous"]),
        ("router_weights", lambda w: w.bfloat16(), TypeError, ["router_weights", "float32", "bfloat16"]),
        ("schedule", lambda s: s.tensors(), TypeError, ["schedule must be a MoKSchedule", "dict"]),
        ("schedule", lambda s: taken_apart(s, peer_rank=s.peer_rank[:-128]), ValueError, ["schedule.peer_token_idx"]),
        (
            "schedule",
            lambda s: taken_apart(s, counts=s.counts.long()),
            TypeError,
            ["schedule.counts", "int32", "int64"],
        ),
        ("schedule", lambda s: taken_apart(s, window_start=s.window_start[1:]), ValueError, ["schedule.window_start"]),
        ("schedule", lambda s: taken_apart(s, route_row=s.route_row[1:]), ValueError, ["schedule.route_row", "[19]"]),
        ("schedule", lambda s: taken_apart(s, peer_rank=s.peer_rank + 2), ValueError, ["names rank 3", "2 ranks"]),
        ("swiglu_limit", lambda _: -0.5, ValueError, ["swiglu_limit", "-0.5"]),
        ("swiglu_limit", lambda _: float("nan"), ValueError, ["swiglu_limit", "nan"]),
        ("swiglu_limit", lambda _: "7", TypeError, ["swiglu_limit", "str"]),
        ("w_shared_up", lambda _: None, ValueError, ["all given or all None", "w_shared_gate, w_shared_down"]),
        ("w_shared_gate", lambda w: w[:100], ValueError, ["shared_intermediate_size", "100"]),
        ("config", lambda c: dataclasses.replace(c, ring="serial"), ValueError, ["config must agree"]),
        ("config", lambda c: "fused", TypeError, ["config must be a MoKConfig", "str"]),
        ("w_routed_gate", lambda w: w[:2], ValueError, ["2 experts", "4"]),
        ("w_routed_gate", lambda w: w[0], ValueError, ["w_routed_gate must be [El, I, H]"]),
        ("w_routed_gate", lambda w: w[:, :96].contiguous(), ValueError, ["intermediate_size", "96", "64"]),
    ]
    for name in (*ROUTED, *SHARED):
        cases.append((name, lambda w: w.float(), TypeError, [f"{name} must be torch.bfloat16", "float32"]))
        cases.append((name, lambda w: w.transpose(-1, -2), ValueError, [f"{name} must be contiguous"]))
    for name in ("w_routed_up", "w_routed_down", "w_shared_up", "w_shared_down"):
        swapped = lambda w: w.transpose(-1, -2).contiguous()  # noqa: E731
        cases.append((name, swapped, ValueError, [f"{name} must be ["]))
    return [pytest.param(*case, id=f"{case[0]}: {case[3][0]}") for case in cases]


@pytest.mark.parametrize(("name", "change", "error", "words"), wrong_arguments())
def test_wrong_arguments_are_named(name: str, change: Any, error: type[Exception], words: list[str]) -> None:
    workload = make_workload([12, 10])
    config = MoKConfig()
    seen: dict[int, Exception] = {}

    def step(member: Any) -> Tensor:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        arguments: dict[str, Any] = {
            "config": config,
            "workspace": workspace,
            "schedule": build(workload, workspace, config),
            "x": workload.x[rank],
            "router_weights": workload.router_weights[rank],
            **dict(zip((*SHARED, *ROUTED), weights_of(workload, member), strict=True)),
            "swiglu_limit": None,
        }
        wrong = {**arguments, name: change(arguments[name])} if rank == 1 else arguments
        with pytest.raises(error if rank == 1 else MoKPeerError) as caught:
            functional.forward(**wrong)
        seen[rank] = caught.value
        return functional.forward(**arguments)[0]

    assert_right(workload, torch.cat(LocalGroup(2).run(step)))
    for word in words:
        assert word in str(seen[1])
        assert word in str(seen[0])


@pytest.mark.parametrize(
    ("num_local_experts", "error", "words"),
    [(0, ValueError, ["num_local_experts", "0"]), (4.0, TypeError, ["num_local_experts", "float"])],
)
def test_wrong_number_of_experts_is_named(num_local_experts: Any, error: type[Exception], words: list[str]) -> None:
    workload = make_workload([12])

    def step(workspace: functional.Workspace) -> None:
        ids = workload.expert_ids[0]
        functional.build_schedule(workspace, MoKConfig(), ids, num_local_experts=num_local_experts)

    with pytest.raises(error) as caught:
        all_ranks(workload, MoKConfig(), step)
    for word in words:
        assert word in str(caught.value)
