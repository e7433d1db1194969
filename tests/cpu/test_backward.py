"""functional.backward: right against float64 autograd, the same bits whatever runs it, and what must not show.

The bits are compared with those of the fused plan with default settings, whose ring holds all rows; small rings replay
later macrobatches and carry weight gradients over their boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from cases import CASES, missing, nobody
from helpers import (
    FULL_RING,
    GRADIENTS,
    SMALL_RING,
    all_ranks,
    assert_gradients_right,
    assert_same,
    backward,
    build,
    call_both,
    forward,
    make_workload,
    recompute,
    regroup,
    run_both,
    same_bits,
    weights_of,
    workspace_for,
)
from test_bits import problems
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKForwardContext, MoKPeerError, functional
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload

PLANS = [str(plan) for plan in all_plans()]
SOME_PLANS = ["fused", "split", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down|combine"]
MODES = SOME_PLANS[:3]
WEIGHT_GRADIENTS = GRADIENTS[2:]
MAIN_GRADS = ("d_shared_gate", "d_routed_gate", "d_shared_up", "d_routed_up", "d_shared_down", "d_routed_down")

Results = list[dict[str, Tensor]]
"""By rank: output and gradients by name."""


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Several macrobatches of 256 rows a rank; experts that straddle their boundaries."""
    return make_workload([150, 3, 0, 247], K=3, seed=1)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> Results:
    """The fused plan with default settings, which is right."""
    results = run_both(workload)
    assert_gradients_right(workload, results)
    return results


def assert_all_same(given: Results, wanted: Results) -> None:
    for mine, theirs in zip(given, wanted, strict=True):
        assert_same(mine, theirs)


# ---- right ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_right(case: str, mode: str) -> None:
    num_tokens, options = CASES[case]
    workload = make_workload(num_tokens, **options)
    results = run_both(workload, MoKConfig(mode=mode, minibatch_size=256, macrobatch_size=1024))
    assert_gradients_right(workload, results)
    for rank, result in enumerate(results):
        num_local = workload.shape.num_experts // workload.num_ranks
        ids = torch.cat([ids.flatten() for ids in workload.expert_ids])
        load = torch.bincount(ids[ids >= 0], minlength=workload.shape.num_experts)
        for expert, count in enumerate(load[rank * num_local : (rank + 1) * num_local].tolist()):
            for name in ("d_routed_gate", "d_routed_up", "d_routed_down"):
                zeros = torch.zeros_like(result[name][expert])
                assert count or same_bits(result[name][expert], zeros), "not an exact zero"
        assert not result["d_router_weights"][workload.expert_ids[rank] < 0].any()


def test_it_rounds_where_the_reference_does() -> None:
    """Nearly every bit is that of the reference in bfloat16: only sums run in another order."""
    workload = make_workload([150, 90], K=3)
    rounded = workload.reference_gradients(torch.bfloat16)
    results = run_both(workload)
    for name in GRADIENTS:
        given, wanted = (torch.cat(parts) for parts in ([result[name] for result in results], rounded[name]))
        if name == "d_router_weights":  # float32
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert (given == wanted).double().mean() > 0.97, name


def test_router_gradients_do_not_depend_on_the_weights() -> None:
    """Zero, negative and tiny weights: the very bits of what a weight of one gets."""
    workload = make_workload([60, 9], K=4)
    ones = dataclasses.replace(workload, router_weights=[torch.ones_like(w) for w in workload.router_weights])
    wanted = [result["d_router_weights"] for result in run_both(ones)]
    values = torch.tensor([0.0, -3.0, 1e-20, -1e-38])
    odd = dataclasses.replace(workload, router_weights=[values.expand_as(w).clone() for w in workload.router_weights])
    for mode in MODES:
        results = run_both(odd, MoKConfig(mode=mode, **SMALL_RING))
        for result, want in zip(results, wanted, strict=True):
            assert same_bits(result["d_router_weights"], want)
        assert_gradients_right(odd, results)
    assert torch.cat(wanted).abs().sum() > 0


def test_missing_routes_get_the_shared_expert_or_zeros() -> None:
    """A token without a route has the very d_x of the shared expert."""
    workload, lonely = make_workload([20, 3], routing=missing), make_workload([20, 3], routing=nobody)
    for rank, (result, alone) in enumerate(zip(run_both(workload), run_both(lonely), strict=True)):
        without = (workload.expert_ids[rank] < 0).all(1)
        assert without.any() or rank
        assert same_bits(result["d_x"][without], alone["d_x"][without])
        for name in WEIGHT_GRADIENTS[3:]:
            assert same_bits(result[name], alone[name])
    for result in run_both(make_workload([20, 3], routing=nobody, S=0)):
        assert all(same_bits(part, torch.zeros_like(part)) for part in result.values())


def test_the_weight_of_a_missing_route_is_not_read() -> None:
    workload = make_workload([40, 41])
    wanted = run_both(workload)
    for ids, weights in zip(workload.expert_ids, workload.router_weights, strict=True):
        weights[ids < 0] = float("nan")
    assert_all_same(run_both(workload, MoKConfig(mode="split", **SMALL_RING)), wanted)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_gradient_passes_at_the_limit(limit: float) -> None:
    """Gate and up of a token are the first columns of the weights, so they can stand exactly at the limit."""
    workload = make_workload([4], E=1, K=1, routing=lambda *_: torch.zeros(4, 1, dtype=torch.int64), swiglu_limit=limit)
    edges = torch.tensor([-limit - 0.5, -limit, 0.25, limit, limit + 0.5]).repeat(26)[:128]
    workload.x[0].zero_()[:, 0] = 1
    weights = workload.weights
    for gate, up in ((weights.routed_gate[0], weights.routed_up[0]), (weights.shared_gate, weights.shared_up)):
        assert gate is not None and up is not None
        gate[:, 0] = torch.cat([edges, edges])[: len(gate)]
        up[:, 0] = torch.cat([edges, edges]).sort().values[: len(up)]
    for mode in MODES:
        (result,) = run_both(workload, MoKConfig(mode=mode))
        assert_gradients_right(workload, [result])
        passes = weights.routed_gate[0, :, 0] <= limit
        assert result["d_routed_gate"][0][passes].any() or limit == 0
        assert not result["d_routed_gate"][0][~passes].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stays_in_its_token_and_experts(mode: str) -> None:
    workload = make_workload([130, 130])
    config = MoKConfig(mode=mode, **SMALL_RING)
    plain = run_both(workload, config)
    workload.x[0][17] = float("nan")
    poisoned = run_both(workload, config)
    touched = set(workload.expert_ids[0][17].tolist()) - {-1}
    assert len(touched) < 8
    for rank, (given, wanted) in enumerate(zip(poisoned, plain, strict=True)):
        rest = torch.ones(130, dtype=torch.bool)
        rest[17] = rank != 0
        for name in ("output", "d_x", "d_router_weights"):
            assert same_bits(given[name][rest], wanted[name][rest])
        for local in range(4):
            for name in ("d_routed_gate", "d_routed_up", "d_routed_down"):
                is_same = same_bits(given[name][local], wanted[name][local])
                assert is_same == (rank * 4 + local not in touched)


# ---- the same bits ----


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ring", [SMALL_RING, FULL_RING], ids=["small ring", "full ring"])
def test_plans(workload: Workload, expected: Results, plan: str, ring: dict[str, int]) -> None:
    assert_all_same(run_both(workload, MoKConfig(mode=plan, **ring)), expected)


@pytest.mark.parametrize("seed", range(16))
def test_random_orders(workload: Workload, expected: Results, seed: int) -> None:
    config = MoKConfig(mode=PLANS[5 * seed % 16], **SMALL_RING)
    assert_all_same(run_both(workload, config, order="random", seed=seed), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("order", ["round_robin", "last_first"])
def test_workers(workload: Workload, expected: Results, plan: str, num_workers: int, order: str) -> None:
    config = MoKConfig(mode=plan, **SMALL_RING)
    assert_all_same(run_both(workload, config, num_workers=num_workers, order=order), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("options", [SMALL_RING, {**FULL_RING, "dispatch": "push", "combine": "pull"}], ids=str)
def test_threads(workload: Workload, expected: Results, plan: str, num_workers: int, options: dict[str, Any]) -> None:
    config = MoKConfig(mode=plan, **options)
    assert_all_same(run_both(workload, config, executor="threads", num_workers=num_workers), expected)


ABLATIONS: list[dict[str, Any]] = [
    {"minibatch_size": 128, "macrobatch_size": 128},
    {"minibatch_size": 384, "macrobatch_size": 384},
    {"minibatch_size": 128, "macrobatch_size": 640},
    {**SMALL_RING, "ring": "serial"},
    {**SMALL_RING, "signal_grain": "minibatch"},
    {"minibatch_size": 256, "macrobatch_size": 512, "signal_grain": "minibatch", "ring": "serial"},
    {"minibatch_size": 256, "macrobatch_size": 256, "row_block": 256},
    {"minibatch_size": 512, "macrobatch_size": 1024, "row_block": 256, "signal_grain": "minibatch"},
    {**SMALL_RING, "bwd_num_comm_sms": 1},
    {**SMALL_RING, "fwd_num_comm_sms": 3, "bwd_num_comm_sms": 7},
    {**SMALL_RING, "schedule_capacity_multiplier": 4.0},
    {**FULL_RING, "dispatch": "push"},
    {**FULL_RING, "dispatch": "pull_once"},
    {**FULL_RING, "combine": "pull"},
    {**FULL_RING, "dispatch": "push", "combine": "pull", "signal_grain": "minibatch"},
    {**FULL_RING, "dispatch": "push", "combine": "pull", "row_block": 256, "ring": "serial"},
]


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_ablations(workload: Workload, expected: Results, plan: str, options: dict[str, Any]) -> None:
    assert_all_same(run_both(workload, MoKConfig(mode=plan, **options)), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks(workload: Workload, expected: Results, num_ranks: int) -> None:
    """What belongs to a token has the same bits on any R. Weight gradients sum in the order of rows, which
    depends on it."""
    regrouped = regroup(workload, num_ranks)
    results = run_both(regrouped, MoKConfig(**SMALL_RING))
    for name in ("output", "d_x", "d_router_weights"):
        assert same_bits(*(torch.cat([result[name] for result in part]) for part in (results, expected))), name
    assert_gradients_right(regrouped, results)


@pytest.mark.parametrize("mode", SOME_PLANS)
@pytest.mark.parametrize("ring", [SMALL_RING, FULL_RING, {**FULL_RING, "dispatch": "push"}], ids=str)
def test_a_recomputed_context_is_the_saved_one(
    workload: Workload, expected: Results, mode: str, ring: dict[str, Any]
) -> None:
    config = MoKConfig(mode=mode, **ring)

    def step(workspace: functional.Workspace) -> dict[str, Tensor]:
        schedule = build(workload, workspace, config)
        _, saved = forward(workload, workspace, config, schedule)
        context = recompute(workload, workspace, config, schedule)
        for item in dataclasses.fields(context):
            kept = slice(0, schedule.num_rows)
            assert same_bits(getattr(context, item.name)[kept], getattr(saved, item.name)[kept])
        return backward(workload, workspace, config, schedule, context)

    for given, wanted in zip(all_ranks(workload, config, step), expected, strict=True):
        assert_same(given, wanted, without=("output",))


@hypothesis.given(problems())
@hypothesis.settings(max_examples=60)
def test_any_problem(problem: tuple[Workload, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    workload, configs, groups = problem
    first, second = (
        run_both(workload, MoKConfig(**config), **group) for config, group in zip(configs, groups, strict=True)
    )
    assert_gradients_right(workload, first)
    assert_all_same(second, first)
    on_one = run_both(regroup(workload, 1), MoKConfig(**configs[1]))[0]
    for name in ("output", "d_x", "d_router_weights"):
        assert same_bits(torch.cat([result[name] for result in first]), on_one[name]), name


# ---- memory and order ----


def poison(workspace: functional.Workspace) -> None:
    """Every region that holds values is full of NaN."""
    shape = workspace.shared.native
    for name in (
        "x",
        "d_output",
        "router_weights",
        "d_router",
        "combine",
        "shared_hidden",
        "shared_y",
        "shared_d_gate",
    ):
        workspace.shared.region(workspace.member.rank(), name, torch.uint8).fill_(0xFF)
    for name in functional_regions():
        if shape.region_bytes(workspace.member.rank(), name):
            workspace.shared.region(workspace.member.rank(), name, torch.uint8).fill_(0xFF)


def functional_regions() -> Iterator[str]:
    for name in ("x", "y", "gate", "up", "hidden", "d_y", "weight", "d_hidden", "d_gate", "d_up"):
        yield f"ring_{name}"
    yield from ("router_partials", "shared_d_up", "carry")


@pytest.mark.parametrize("mode", SOME_PLANS)
@pytest.mark.parametrize("ring", [SMALL_RING, FULL_RING], ids=["small ring", "full ring"])
def test_poisoned_memory_does_not_show(workload: Workload, expected: Results, mode: str, ring: dict[str, int]) -> None:
    """Padding, empty experts and what an earlier call left: two passes over memory full of NaN, and fresh tensors
    that are full of NaN too."""
    config = MoKConfig(mode=mode, **ring)

    def step(workspace: functional.Workspace) -> Results:
        results = []
        for _ in range(3):
            results.append(call_both(workload, workspace, config))
            poison(workspace)
        return results

    torch.use_deterministic_algorithms(True)
    try:
        for results, wanted in zip(all_ranks(workload, config, step), expected, strict=True):
            for given in results:
                assert_same(given, wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_context_serves_twice_and_others_come_between() -> None:
    """F F B B, B again, and schedules, forwards and recomputations between: a context is only read."""
    first, second = make_workload([90, 20], seed=1), make_workload([20, 90], E=20, I=320, S=64, seed=2)
    config = MoKConfig(**SMALL_RING)
    alone = [run_both(w, config) for w in (first, second)]

    def step(member: Any) -> list[tuple[int, dict[str, Tensor]]]:
        workspace = workspace_for(first, member, config)
        schedules = [build(w, workspace, config) for w in (first, second)]
        contexts = [forward(w, workspace, config, s)[1] for w, s in zip((first, second), schedules, strict=True)]
        copies = [[getattr(c, item.name).clone() for item in dataclasses.fields(c)] for c in contexts]
        results = []
        for i in (0, 1, 1, 0, 0, 1):
            w = (first, second)[i]
            results.append((i, backward(w, workspace, config, schedules[i], contexts[i])))
            forward((second, first)[i], workspace, config, schedules[1 - i], save_context=False)
            recompute(w, workspace, config, schedules[i])
            build((second, first)[i], workspace, config)
        for context, old in zip(contexts, copies, strict=True):
            for item, tensor in zip(dataclasses.fields(context), old, strict=True):
                assert same_bits(getattr(context, item.name), tensor)
        return results

    for rank, results in enumerate(LocalGroup(2).run(step)):
        for i, given in results:
            assert_same(given, alone[i][rank], without=("output",))


def test_fewer_tokens_on_the_same_workspace(workload: Workload, expected: Results) -> None:
    few = make_workload([1, 0, 3, 2], K=3)
    config = MoKConfig(**SMALL_RING)
    wanted = run_both(few, config)

    def step(workspace: functional.Workspace) -> list[dict[str, Tensor]]:
        return [call_both(w, workspace, config) for w in (workload, few, workload, few)]

    for rank, results in enumerate(all_ranks(workload, config, step)):
        for given, want in zip(results, (expected, wanted, expected, wanted), strict=True):
            assert_same(given, want[rank])


# ---- main_grads, halves ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ring", [SMALL_RING, FULL_RING], ids=["small ring", "full ring"])
def test_main_grads(mode: str, ring: dict[str, int]) -> None:
    """One float32 addition of the float32 sum; an expert without rows leaves its part alone."""
    workload = make_workload([150, 90], routing=lambda r, n, g: torch.randint(0, 7, (n, 2), generator=g))
    config = MoKConfig(mode=mode, **ring)

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        plain = backward(workload, workspace, config, schedule, context)

        def added_to(dtype: torch.dtype, start: float) -> dict[str, Tensor]:
            mains = [torch.full_like(plain[name], start, dtype=dtype) for name in MAIN_GRADS]
            given = backward(workload, workspace, config, schedule, context, main_grads=mains)
            assert_same(given, plain, without=WEIGHT_GRADIENTS)
            return dict(zip(MAIN_GRADS, mains, strict=True))

        sums = added_to(torch.float32, 0.0)
        for name, total in sums.items():
            assert same_bits(total.bfloat16(), plain[name])
        for dtype in (torch.float32, torch.bfloat16):
            for name, main in added_to(dtype, 0.75).items():
                assert same_bits(main, (0.75 + sums[name]).to(dtype)), name
        if workspace.member.rank() == 1:  # nobody chose expert 7; a NaN there would spread by any addition
            for name, main in added_to(torch.float32, float("nan")).items():
                assert main.isnan().all(), name
            untouched = added_to(torch.float32, -0.0)["d_routed_up"][3]
            assert same_bits(untouched, torch.full_like(untouched, -0.0))
        else:
            for start in (float("nan"), -0.0):
                added_to(torch.float32, start)

    all_ranks(workload, config, step)


def test_main_grads_without_a_shared_expert() -> None:
    workload = make_workload([50], S=0)
    config = MoKConfig()

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        plain = backward(workload, workspace, config, schedule, context)
        mains = [torch.zeros_like(plain[name]) if name in plain else None for name in MAIN_GRADS]
        backward(workload, workspace, config, schedule, context, main_grads=mains)
        for name, main in zip(MAIN_GRADS, mains, strict=True):
            assert main is None or same_bits(main, plain[name])

    all_ranks(workload, config, step)


@pytest.mark.parametrize("mode", MODES)
def test_dgrad_and_wgrad_apart(workload: Workload, expected: Results, mode: str) -> None:
    """Weight gradients may wait until other calls have used the workspace."""
    config = MoKConfig(mode=mode, **FULL_RING)

    def step(workspace: functional.Workspace) -> dict[str, Tensor]:
        rank = workspace.member.rank()
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        weights = weights_of(workload, workspace.member)
        x, d_output = workload.x[rank], workload.d_outputs()[rank]
        head = (config, workspace, schedule, context)
        d_x, d_router, saved = functional.backward_dgrad(
            *head, d_output, x, workload.router_weights[rank], *weights, workload.swiglu_limit
        )
        call_both(workload, workspace, config)
        poison(workspace)
        found = functional.backward_wgrad(*head, saved, d_output, x, *weights)
        return {"d_x": d_x, "d_router_weights": d_router, **dict(zip(WEIGHT_GRADIENTS, found, strict=True))}

    for given, wanted in zip(all_ranks(workload, config, step), expected, strict=True):
        assert_same(given, wanted, without=("output",))


def test_the_halves_need_the_whole_ring() -> None:
    workload = make_workload([300])
    config = MoKConfig(**SMALL_RING)

    def step(workspace: functional.Workspace) -> None:
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        arguments = (workload.d_outputs()[0], workload.x[0], workload.router_weights[0])
        functional.backward_dgrad(
            config, workspace, schedule, context, *arguments, *weights_of(workload, workspace.member)
        )

    with pytest.raises(ValueError, match="dgrad and wgrad apart need a ring that holds all rows"):
        all_ranks(workload, config, step)


# ---- what is refused ----


def wrong_arguments() -> list[Any]:
    """(argument, what to make of it, error, words)"""
    cases: list[tuple[str, Any, type[Exception], list[str]]] = [
        ("d_output", lambda d: d.float(), TypeError, ["d_output must be torch.bfloat16", "float32"]),
        ("d_output", lambda d: d.t().contiguous().t(), ValueError, ["d_output must be contiguous"]),
        ("d_output", lambda d: d[:-1], ValueError, ["d_output must be [T, H] = [10, 64]", "[9, 64]"]),
        ("d_output", lambda d: None, TypeError, ["d_output must be a tensor", "NoneType"]),
        ("context", lambda c: tuple(vars(c).values()), TypeError, ["context must be a MoKForwardContext", "tuple"]),
        ("context", lambda c: dataclasses.replace(c, gate=c.gate[1:]), ValueError, ["context.gate must be"]),
        ("context", lambda c: dataclasses.replace(c, up=c.up.float()), TypeError, ["context.up", "float32"]),
        (
            "context",
            lambda c: MoKForwardContext(*(torch.empty(0, 64, dtype=torch.bfloat16) for _ in vars(c))),
            ValueError,
            ["context is empty", "recompute_forward_context"],
        ),
        ("x", lambda x: x[:9], ValueError, ["x has 9 tokens", "10"]),
        ("router_weights", lambda w: w.double(), TypeError, ["router_weights", "float64"]),
        ("main_grads", lambda m: m[:5], ValueError, ["main_grads must be six tensors", "5"]),
        ("main_grads", lambda m: [t.half() for t in m], TypeError, ["main_grads", "float16"]),
        ("main_grads", lambda m: [m[0], m[1].bfloat16(), *m[2:]], TypeError, ["d_routed_gate", "bfloat16"]),
        ("main_grads", lambda m: [m[0], m[5], *m[2:]], ValueError, ["main_grads: d_routed_gate must be"]),
        ("main_grads", lambda m: [None, *m[1:]], TypeError, ["main_grads: d_shared_gate", "NoneType"]),
    ]
    return [pytest.param(*case, id=f"{case[0]}: {case[3][0]}") for case in cases]


@pytest.mark.parametrize(("name", "change", "error", "words"), wrong_arguments())
def test_wrong_arguments_are_named(name: str, change: Any, error: type[Exception], words: list[str]) -> None:
    workload = make_workload([12, 10])
    config = MoKConfig()
    seen: dict[int, Exception] = {}

    def step(member: Any) -> dict[str, Tensor]:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        output, context = forward(workload, workspace, config, schedule)
        plain = backward(workload, workspace, config, schedule, context)
        given: dict[str, Any] = {
            "context": context,
            "d_output": workload.d_outputs()[rank],
            "x": workload.x[rank],
            "router_weights": workload.router_weights[rank],
            "main_grads": [torch.zeros_like(plain[name], dtype=torch.float32) for name in MAIN_GRADS],
        }
        wrong = {**given, name: change(given[name])} if rank == 1 else given
        with pytest.raises(error if rank == 1 else MoKPeerError) as caught:
            functional.backward(
                config,
                workspace,
                schedule,
                wrong["context"],
                wrong["d_output"],
                wrong["x"],
                wrong["router_weights"],
                *weights_of(workload, member),
                main_grads=wrong["main_grads"],
            )
        seen[rank] = caught.value
        again = backward(workload, workspace, config, schedule, context)  # nothing was launched
        assert_same(again, plain)
        return {"output": output, **again}

    assert_gradients_right(workload, LocalGroup(2).run(step))
    for word in words:
        assert word in str(seen[1])
        assert word in str(seen[0])
