"""The MXFP8 layer on CPU ranks: against its torch reference, and the same bits however it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import (
    FULL_RING,
    GRADIENTS,
    SMALL_RING,
    all_ranks,
    assert_gradients_right,
    assert_same,
    backward,
    build,
    forward,
    make_layer,
    make_workload,
    recompute,
    regroup,
    run_both,
    same_bits,
    weights_of,
    workspace_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok_modular import LocalGroup, MoE, MoKConfig, MoKPeerError, functional, ops
from mok_modular.calls.precision import pack_backward
from mok_modular.protocol.plan import all_plans
from mok_modular.stages import dispatch, quantize, schedule
from mok_modular.testing import Workload

PLANS = [str(plan) for plan in all_plans()]
SOME_PLANS = ["fused", "split", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down|combine"]
NUM_TOKENS = [137, 3, 0, 200]
SIZES = {"H": 128, "I": 256, "S": 384, "E": 8, "K": 3}
MIN_COSINE = 0.996

Results = list[dict[str, Tensor]]
"""By rank: output and gradients by name."""


def make_mxfp8_workload(num_tokens: list[int], **options: Any) -> Workload:
    return make_workload(num_tokens, precision="mxfp8", **{**SIZES, **options})


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Several macrobatches of 256 rows a rank; experts that straddle their boundaries."""
    return make_mxfp8_workload(NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> Results:
    """The fused plan with default settings, which is right."""
    results = run_both(workload)
    assert_results_right(workload, results)
    return results


def joined(results: Results, name: str) -> Tensor:
    return torch.cat([result[name] for result in results])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def assert_results_right(workload: Workload, results: Results) -> None:
    """No further from the exact layer than the reference is, by more than half; and next to the reference."""
    assert_gradients_right(workload, results)
    wanted = {"output": workload.reference(torch.bfloat16), **workload.reference_gradients(torch.bfloat16)}
    for name in results[0]:
        # Sums in another order round elsewhere now and then; a quantization at another place would be 2% off.
        assert distance(joined(results, name), torch.cat(wanted[name])) < 2e-3, name


def assert_all_same(given: Results, wanted: Results) -> None:
    for mine, theirs in zip(given, wanted, strict=True):
        assert_same(mine, theirs)


# ---- right ----


def test_gradients_point_where_those_of_bf16_do(workload: Workload, expected: Results) -> None:
    bf16 = run_both(dataclasses.replace(workload, precision="bf16"))
    for name in expected[0]:
        assert cosine(joined(expected, name), joined(bf16, name)) >= MIN_COSINE, name


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_swiglu_limit(limit: float) -> None:
    workload = make_mxfp8_workload([90, 41], swiglu_limit=limit, seed=3)
    assert_results_right(workload, run_both(workload, MoKConfig(mode="split", **SMALL_RING)))
    assert_all_same(run_both(workload), run_both(workload, MoKConfig(mode="split")))


def test_without_a_shared_expert() -> None:
    workload = make_mxfp8_workload([90, 41], S=0)
    assert_results_right(workload, run_both(workload))


def test_router_weights_of_every_size() -> None:
    workload = make_mxfp8_workload([64, 64], seed=5)
    for weights in workload.router_weights:
        weights[::4], weights[1::4] = 0.0, 1e-20
        weights[2::4] = -weights[2::4].abs()
    ones = dataclasses.replace(workload, router_weights=[torch.ones_like(w) for w in workload.router_weights])
    results = run_both(workload)
    assert_results_right(workload, results)
    for mine, theirs in zip(results, run_both(ones), strict=True):  # the weight does not enter
        assert same_bits(mine["d_router_weights"], theirs["d_router_weights"])
    assert (joined(results, "d_router_weights")[torch.cat(workload.router_weights) == 0] != 0).any()


def test_experts_without_rows_and_ranks_without_tokens() -> None:
    def routing(_rank: int, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, 4, (count, SIZES["K"]), generator=generator)

    workload = make_mxfp8_workload([0, 70], routing=routing)
    results = run_both(workload, MoKConfig(wire="mxfp8", **SMALL_RING))
    assert_results_right(workload, results)
    for name in ("d_routed_gate", "d_routed_up", "d_routed_down"):
        gradient = joined(results, name)
        assert not torch.cat([gradient[:2], gradient[4:]]).view(torch.int16).any()
    for result in run_both(make_mxfp8_workload([0, 0]), MoKConfig(wire="mxfp8")):
        assert result["output"].shape == (0, SIZES["H"])
        assert not result["d_routed_gate"].view(torch.int16).any()


def test_context_holds_tokens_as_they_were_dispatched(workload: Workload) -> None:
    tables = schedule.reference(workload.expert_ids, num_experts=SIZES["E"])
    rows = dispatch.reference([quantize.round_trip(x) for x in workload.x], tables, topk=SIZES["K"])

    for wire in ("bf16", "mxfp8"):
        config = MoKConfig(wire=wire, **FULL_RING)

        def step(workspace: Any, config: MoKConfig = config) -> Tensor:
            return forward(workload, workspace, config, build(workload, workspace, config))[1].x

        for x, want in zip(all_ranks(workload, config, step), rows, strict=True):
            assert same_bits(x[: len(want)], want)


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_tokens_of_every_kind(wire: str) -> None:
    """Zeros, subnormals, the largest numbers, NaN and Inf travel as the definition says; finite ones stay finite."""
    x = torch.zeros(8, SIZES["H"], dtype=torch.bfloat16)
    largest = torch.finfo(torch.bfloat16).max
    x[1, :] = 2.0**-133
    x[2, ::3] = largest
    x[3, :40] = torch.linspace(-3e38, 3e38, 40).bfloat16()
    x[4, 5], x[5, 6], x[6, 7] = float("nan"), float("inf"), -float("inf")
    x[7] = torch.randn(SIZES["H"]).bfloat16() * 1e-38
    workload = dataclasses.replace(make_mxfp8_workload([8], E=1, K=1), x=[x])
    workload.expert_ids[0].zero_()
    config = MoKConfig(wire=wire)

    (got,) = all_ranks(
        workload,
        config,
        lambda workspace: forward(workload, workspace, config, build(workload, workspace, config))[1].x[:8],
    )
    want = quantize.round_trip(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0))
    assert got[x.isfinite().all(1)].isfinite().all()


# ---- the same bits ----


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_plans_and_wires(workload: Workload, expected: Results, plan: str, wire: str) -> None:
    assert_all_same(run_both(workload, MoKConfig(mode=plan, wire=wire, **SMALL_RING)), expected)


ABLATIONS: list[dict[str, Any]] = [
    {"minibatch_size": 128, "macrobatch_size": 128},
    {"minibatch_size": 384, "macrobatch_size": 384, "wire": "mxfp8"},
    {**FULL_RING},
    {**SMALL_RING, "ring": "serial", "wire": "mxfp8"},
    {**SMALL_RING, "signal_grain": "minibatch"},
    {"minibatch_size": 256, "macrobatch_size": 256, "row_block": 256, "wire": "mxfp8"},
    {"minibatch_size": 512, "macrobatch_size": 1024, "row_block": 256, "signal_grain": "minibatch"},
    {**SMALL_RING, "fwd_num_comm_sms": 7, "bwd_num_comm_sms": 1},
    {**FULL_RING, "dispatch": "push"},
    {**FULL_RING, "combine": "pull", "wire": "mxfp8"},
    {**FULL_RING, "dispatch": "push", "combine": "pull", "signal_grain": "minibatch"},
]


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_ablations(workload: Workload, expected: Results, plan: str, options: dict[str, Any]) -> None:
    assert_all_same(run_both(workload, MoKConfig(mode=plan, **options)), expected)


@pytest.mark.parametrize("seed", range(12))
def test_random_orders(workload: Workload, expected: Results, seed: int) -> None:
    config = MoKConfig(mode=PLANS[5 * seed % 16], wire=["bf16", "mxfp8"][seed % 2], **SMALL_RING)
    assert_all_same(run_both(workload, config, order="random", seed=seed, num_workers=1 + seed % 5), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_threads(workload: Workload, expected: Results, plan: str, wire: str) -> None:
    config = MoKConfig(mode=plan, wire=wire, **SMALL_RING)
    assert_all_same(run_both(workload, config, executor="threads", num_workers=3), expected)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, list[dict[str, Any]], list[dict[str, Any]]]:
    """A workload, and two choices of config and group that must not matter."""
    num_ranks = draw(st.sampled_from([1, 2, 3]))
    sizes = {
        "E": num_ranks * draw(st.integers(1, 4)),
        "K": draw(st.sampled_from([1, 2, 5])),
        "H": 128 * draw(st.integers(1, 2)),
        "I": 128 * draw(st.integers(1, 2)),
        "S": 128 * draw(st.integers(0, 2)),
    }
    num_tokens = [draw(st.sampled_from([0, 1, 7, 31, 33, 130])) for _ in range(num_ranks)]
    limit = draw(st.sampled_from([None, 0.0, 0.7]))
    workload = make_mxfp8_workload(num_tokens, seed=draw(st.integers(0, 1000)), swiglu_limit=limit, **sizes)
    configs, groups = [], []
    for _ in range(2):
        row_block = draw(st.sampled_from([128, 256]))
        minibatch = row_block * draw(st.integers(1, 3))
        config = {
            "mode": draw(st.sampled_from(PLANS)),
            "wire": draw(st.sampled_from(["bf16", "mxfp8"])),
            "row_block": row_block,
            "minibatch_size": minibatch,
            "macrobatch_size": minibatch * draw(st.integers(1, 3)),
            "signal_grain": draw(st.sampled_from(["row_block", "minibatch"])),
            "ring": draw(st.sampled_from(["interleaved", "serial"])),
        }
        if draw(st.booleans()):
            config["macrobatch_size"] = 64 * minibatch
            config["combine"] = draw(st.sampled_from(["pull", "push"]))
        configs.append(config)
        orders = st.sampled_from(["round_robin", "random", "last_first"])
        groups.append(
            {"order": draw(orders), "seed": draw(st.integers(0, 2**32)), "num_workers": draw(st.integers(1, 6))}
        )
    return workload, configs, groups


@given(problems())
@settings(max_examples=30)
def test_any_problem(problem: tuple[Workload, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    workload, configs, groups = problem
    first, second = (
        run_both(workload, MoKConfig(**config), **group) for config, group in zip(configs, groups, strict=True)
    )
    assert_results_right(workload, first)
    assert_all_same(second, first)


def test_recomputed_context(workload: Workload, expected: Results) -> None:
    for config in (MoKConfig(), MoKConfig(mode="split", wire="mxfp8", **SMALL_RING), MoKConfig(dispatch="push")):

        def step(workspace: Any, config: MoKConfig = config) -> dict[str, Tensor]:
            tables = build(workload, workspace, config)
            return backward(workload, workspace, config, tables, recompute(workload, workspace, config, tables))

        for mine, theirs in zip(all_ranks(workload, config, step), expected, strict=True):
            assert_same(mine, theirs, without=["output"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outputs_do_not_depend_on_the_number_of_ranks(workload: Workload, expected: Results, num_ranks: int) -> None:
    results = run_both(regroup(workload, num_ranks), MoKConfig(wire="mxfp8"))
    for name in ("output", "d_x", "d_router_weights"):
        assert same_bits(joined(results, name), joined(expected, name))


def test_halves_a_context_used_twice_and_main_grads(workload: Workload, expected: Results) -> None:
    config = MoKConfig(wire="mxfp8", **FULL_RING)
    order = ("shared_gate", "routed_gate", "shared_up", "routed_up", "shared_down", "routed_down")

    def step(workspace: Any) -> None:
        rank, want = workspace.member.rank(), expected[workspace.member.rank()]
        tables = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, tables)
        assert_same(backward(workload, workspace, config, tables, context), want, without=["output"])
        weights = weights_of(workload, workspace.member, pack_backward)
        x, d_output = workload.x[rank], workload.d_outputs()[rank]
        args = (config, workspace, tables, context)
        *found, saved = functional.backward_dgrad(*args, d_output, x, workload.router_weights[rank], *weights)
        assert_same(dict(zip(GRADIENTS, found, strict=False)), want, without=["output", *GRADIENTS[2:]])
        kept = {name: tensor.clone() for name, tensor in saved.named_tensors().items()}
        for _ in range(2):
            found = functional.backward_wgrad(*args, saved, d_output, x, *weights)
            assert_same(dict(zip(GRADIENTS[2:], found, strict=True)), want, without=["output", *GRADIENTS[:2]])
        assert all(same_bits(kept[name], tensor) for name, tensor in saved.named_tensors().items())
        main_grads = [torch.zeros(want[f"d_{name}"].shape) for name in order]
        rest = backward(workload, workspace, config, tables, context, main_grads=main_grads)
        assert set(rest) == {"d_x", "d_router_weights"}
        for name, gradient in zip(order, main_grads, strict=True):
            assert torch.equal(gradient.bfloat16(), want[f"d_{name}"])

    all_ranks(workload, config, step)


def test_both_precisions_and_zero_copy_on_one_workspace(workload: Workload, expected: Results) -> None:
    config, quantizing = MoKConfig(mode="split", **SMALL_RING), MoKConfig(wire="mxfp8")
    in_bf16 = dataclasses.replace(workload, precision="bf16")

    def step(workspace: Any) -> None:
        rank = workspace.member.rank()
        want = expected[rank]["output"]
        tables = build(workload, workspace, config)
        outputs = [forward(each, workspace, config, tables)[0] for each in (workload, in_bf16, workload, in_bf16)]
        assert same_bits(outputs[0], want) and same_bits(outputs[2], want)
        assert same_bits(outputs[1], outputs[3]) and (len(want) == 0 or not same_bits(outputs[1], want))
        other = workspace_for(workload, workspace.member, quantizing)
        other.x[: len(workload.x[rank])] = workload.x[rank]
        there = dataclasses.replace(workload, x=[*workload.x[:rank], other.x[: len(want)], *workload.x[rank + 1 :]])
        assert same_bits(forward(there, other, quantizing, build(workload, other, quantizing))[0], want)

    all_ranks(workload, config, step)


def test_the_wire_carries_half_the_bytes(workload: Workload) -> None:
    def num_bytes(wire: str) -> int:
        config = MoKConfig(wire=wire)

        def step(workspace: Any) -> int:
            forward(workload, workspace, config, build(workload, workspace, config))
            return sum(row["num_bytes"] for row in workspace.stage_stats() if row["name"] == "dispatch")

        return sum(all_ranks(workload, config, step))

    rows = sum(int((ids >= 0).sum()) for ids in workload.expert_ids)
    row_bytes = SIZES["H"] + 16  # 4 scales, to the next 16 bytes
    assert num_bytes("bf16") == rows * 4 * SIZES["H"]
    assert num_bytes("mxfp8") == rows * (row_bytes + 2 * SIZES["H"])


# ---- the module ----


@pytest.mark.parametrize("config", [MoKConfig(), MoKConfig(mode="split", wire="mxfp8", **SMALL_RING)], ids=str)
def test_module_and_autograd(workload: Workload, expected: Results, config: MoKConfig) -> None:
    def step(member: Any) -> None:
        rank = member.rank()
        layer = make_layer(workload, member, config)
        x, router_weights = (parts[rank].clone().requires_grad_() for parts in (workload.x, workload.router_weights))
        outputs = [layer(x, workload.expert_ids[rank], router_weights) for _ in range(2)]
        outputs[1].backward(workload.d_outputs()[rank])  # of two micro-batches in flight
        names = GRADIENTS[2:]
        found = [x.grad, router_weights.grad, *(getattr(layer, name.replace("d_", "w_", 1)).grad for name in names)]
        assert_same({"output": outputs[0].detach(), **dict(zip(GRADIENTS, found, strict=True))}, expected[rank])

    LocalGroup(workload.num_ranks).run(step)


def test_compiled_in_one_graph() -> None:
    workload = make_mxfp8_workload([24])
    torch._dynamo.reset()

    def step(member: Any) -> None:
        layer = make_layer(workload, member, num_local_tokens=24)
        args = (workload.x[0], workload.expert_ids[0], workload.router_weights[0])
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert same_bits(compiled(*args), layer(*args))

    LocalGroup(1).run(step)


def test_module_checks_its_arguments() -> None:
    group = LocalGroup(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_experts": 2, "topk": 1, "group": group}
    assert MoE(**sizes, precision="mxfp8").precision == "mxfp8"
    for name in ("hidden_size", "intermediate_size", "shared_intermediate_size"):
        with pytest.raises(ValueError, match=f"{name} must be a multiple of 128 in MXFP8, got 2880"):
            MoE(**{**sizes, name: 2880}, precision="mxfp8")
    with pytest.raises(ValueError, match=r"config\.wire='mxfp8' needs precision='mxfp8', got 'bf16'"):
        MoE(**sizes, config=MoKConfig(wire="mxfp8"))
    with pytest.raises(ValueError, match="precision must be one of 'bf16', 'mxfp8', got 'fp8'"):
        MoE(**sizes, precision="fp8")


# ---- errors ----


def raised(workload: Workload, config: MoKConfig, change: Any, error: Any, match: str) -> None:
    """Forward of one rank with weights that `change` has been at."""

    def step(workspace: Any) -> None:
        tables = build(workload, workspace, config)
        weights = list(weights_of(workload, workspace.member))
        change(weights)
        functional.forward(config, workspace, tables, workload.x[0], workload.router_weights[0], *weights)

    with pytest.raises(error, match=match):
        all_ranks(workload, config, step)


def test_what_is_wrong_is_named() -> None:
    workload = make_mxfp8_workload([5])
    config = MoKConfig()

    def bf16_gate(weights: list[Any]) -> None:
        weights[3] = workload.weights.routed_gate

    def four_parts(weights: list[Any]) -> None:
        weights[5] = (*weights[5], *weights[5])

    def wrong_scale(weights: list[Any]) -> None:
        weights[4] = (weights[4][0], weights[4][1].flatten())

    def wrong_dtype(weights: list[Any]) -> None:
        weights[4] = (weights[4][0].view(torch.uint8), weights[4][1])

    raised(workload, config, bf16_gate, TypeError, "all be BF16 tensors or all be MXFP8 tuples")
    raised(workload, config, four_parts, ValueError, r"w_routed_down must be \(data, scale\) here, got 4 tensors")
    raised(workload, config, wrong_scale, ValueError, r"w_routed_up: scale must be \[8, 2, 1, 32, 16\]")
    raised(
        workload, config, wrong_dtype, TypeError, r"w_routed_up: data must be torch\.float8_e4m3fn, got torch\.uint8"
    )
    narrow = make_mxfp8_workload([5], S=192)
    raised(narrow, config, lambda _: None, ValueError, "shared_intermediate_size must be a multiple of 128 in MXFP8")
    for sizes in ({"H": 192}, {"I": 320}):
        with pytest.raises(ValueError, match="M and N must be multiples of 128 in MXFP8"):
            run_both(make_mxfp8_workload([5], **sizes))
    with pytest.raises(ValueError, match=r"wire='mxfp8' needs dispatch='pull'"):
        MoKConfig(wire="mxfp8", dispatch="push")
    with pytest.raises(ValueError, match="wire must be one of"):
        MoKConfig(wire="fp8")
    with pytest.raises(ValueError, match=r"config\.wire='mxfp8' needs MXFP8 weights, got BF16 ones"):
        run_both(dataclasses.replace(workload, precision="bf16"), MoKConfig(wire="mxfp8"))


def test_ranks_of_two_precisions_are_told() -> None:
    workload = make_mxfp8_workload([5, 6])
    config = MoKConfig()

    def step(workspace: Any) -> None:
        mine = dataclasses.replace(workload, precision=["bf16", "mxfp8"][workspace.member.rank()])
        forward(mine, workspace, config, build(workload, workspace, config))

    with pytest.raises(MoKPeerError, match="precision"):
        all_ranks(workload, config, step)


def test_backward_wants_both_orientations() -> None:
    workload = make_mxfp8_workload([5])
    config = MoKConfig()

    def step(workspace: Any, change: Any) -> None:
        tables = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, tables)
        weights = list(weights_of(workload, workspace.member, pack_backward))
        change(weights)
        args = (workload.d_outputs()[0], workload.x[0], workload.router_weights[0], *weights)
        functional.backward(config, workspace, tables, context, *args)

    def only_rows(weights: list[Any]) -> None:
        weights[3] = weights[3][:2]

    def not_transposed(weights: list[Any]) -> None:
        weights[4] = (*weights[4][:2], *weights[4][:2])

    def down_of_forward(weights: list[Any]) -> None:
        weights[5] = ops.mxfp8_quantize(workload.weights.routed_down)[:2]

    for change, match in (
        (only_rows, r"w_routed_gate must be \(data, scale, data_t, scale_t\) here, got 2 tensors"),
        (not_transposed, r"w_routed_up: data_t must be \[8, 128, 256\], data transposed, got \[8, 256, 128\]"),
        (down_of_forward, r"w_routed_down must be \[El, H, I\] = \[8, 128, 256\], got \[8, 256, 128\]"),
    ):
        with pytest.raises(ValueError, match=match):
            all_ranks(workload, config, lambda workspace, change=change: step(workspace, change))
