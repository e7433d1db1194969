"""The MXFP8 layer on CPU ranks: against its torch reference, and the same bits however it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import FULL_RING, SMALL_RING, build, same_bits, workspace_for
from mxfp8_layer import GRADIENTS, SIZES, backward, d_outputs, forward, make_mxfp8_workload, run_both, weights_of
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, functional, ops, reference_mxfp8
from mok_modular.plan import all_plans
from mok_modular.stages import dispatch, quantize, schedule
from mok_modular.testing import Workload

PLANS = [str(plan) for plan in all_plans()]
SOME_PLANS = ["fused", "split", "dispatch|gate_up+swiglu|down+combine", "dispatch+gate_up|swiglu+down|combine"]
NUM_TOKENS = [137, 3, 0, 200]
MAX_RATIO, MIN_COSINE = 1.5, 0.996


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_mxfp8_workload(NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> dict[str, Tensor]:
    """The fused plan with default settings, which is right."""
    results = run_both(workload)
    assert_right(workload, results)
    return results


def reference(workload: Workload, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients by reference_mxfp8; float64 is the exact layer."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [getattr(workload.weights, name) for name in GRADIENTS[2:]]
    args: list[Any] = [
        [x.to(dtype) for x in workload.x],
        workload.expert_ids,
        [w.to(wide) for w in workload.router_weights],
        *(None if w is None else w.to(dtype) for w in weights),
        workload.swiglu_limit,
    ]
    gradients = reference_mxfp8.backward([d.to(dtype) for d in d_outputs(workload)], *args)
    results: dict[str, Any] = {"output": reference_mxfp8.forward(*args)}
    results |= {name: getattr(gradients, name) for name in GRADIENTS}
    return {name: torch.cat(part) if isinstance(part, list) and part else part for name, part in results.items()}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def assert_right(workload: Workload, results: dict[str, Tensor]) -> None:
    """No further from the exact layer than the reference is, by more than half; and next to the reference."""
    quantized, exact = reference(workload, torch.bfloat16), reference(workload, torch.float64)
    for name, got in results.items():
        if len(quantized[name]) == 0:
            assert got.numel() == 0
            continue
        assert got.shape == quantized[name].shape and got.dtype == quantized[name].dtype, name
        assert distance(got, exact[name]) <= MAX_RATIO * distance(quantized[name], exact[name]), name
        # Sums in another order round elsewhere now and then; a quantization at another place would be 2% off.
        assert distance(got, quantized[name]) < 2e-3, name


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], names: tuple[str, ...] = ("output", *GRADIENTS)) -> None:
    differing = [name for name in names if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))]
    assert not differing


# ---- right ----


def test_gradients_point_where_those_of_bf16_do(workload: Workload, expected: dict[str, Tensor]) -> None:
    bf16 = run_both(workload, is_mxfp8=False)
    for name, got in expected.items():
        assert cosine(got, bf16[name]) >= MIN_COSINE, name


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_swiglu_limit(limit: float) -> None:
    workload = make_mxfp8_workload([90, 41], swiglu_limit=limit, seed=3)
    assert_right(workload, run_both(workload, MoKConfig(mode="split", **SMALL_RING)))
    assert_same(run_both(workload), run_both(workload, MoKConfig(mode="split")))


def test_without_a_shared_expert() -> None:
    workload = make_mxfp8_workload([90, 41], S=0)
    assert_right(workload, run_both(workload))


def test_router_weights_of_every_size() -> None:
    workload = make_mxfp8_workload([64, 64], seed=5)
    for weights in workload.router_weights:
        weights[::4], weights[1::4] = 0.0, 1e-20
        weights[2::4] = -weights[2::4].abs()
    results, wanted = run_both(workload), reference(workload, torch.bfloat16)
    assert distance(results["router_weights"], wanted["router_weights"]) < 2e-3
    zero = torch.cat(workload.router_weights) == 0
    assert (results["router_weights"][zero] != 0).any()


def test_experts_without_rows_and_ranks_without_tokens() -> None:
    def routing(_rank: int, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, 4, (count, SIZES["K"]), generator=generator)

    workload = make_mxfp8_workload([0, 70], routing=routing)
    results = run_both(workload, MoKConfig(wire="mxfp8", **SMALL_RING))
    assert_right(workload, results)
    for name in ("routed_gate", "routed_up", "routed_down"):
        others = torch.cat([results[name][:2], results[name][4:]])
        assert not others.view(torch.int16).any()
    empty = run_both(make_mxfp8_workload([0, 0]), MoKConfig(wire="mxfp8"))
    assert empty["output"].shape == (0, SIZES["H"])
    assert not empty["routed_gate"].view(torch.int16).any()


def test_context_holds_tokens_as_they_were_dispatched(workload: Workload) -> None:
    tables = schedule.reference(workload.expert_ids, num_experts=SIZES["E"])
    rows = dispatch.reference([quantize.round_trip(x) for x in workload.x], tables, topk=SIZES["K"])

    for wire in ("bf16", "mxfp8"):
        config = MoKConfig(wire=wire, **FULL_RING)

        def step(member: Any, config: MoKConfig = config) -> Tensor:
            workspace = workspace_for(workload, member, config)
            return forward(workload, workspace, config, build(workload, workspace, config))[1].x

        for x, want in zip(LocalGroup(len(rows)).run(step), rows, strict=True):
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

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        return forward(workload, workspace, config, build(workload, workspace, config))[1].x[:8]

    (got,) = LocalGroup(1).run(step)
    want = quantize.round_trip(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0))
    assert got[x.isfinite().all(1)].isfinite().all()


# ---- the same bits ----


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_plans_and_wires(workload: Workload, expected: dict[str, Tensor], plan: str, wire: str) -> None:
    assert_same(run_both(workload, MoKConfig(mode=plan, wire=wire, **SMALL_RING)), expected)


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
def test_ablations(workload: Workload, expected: dict[str, Tensor], plan: str, options: dict[str, Any]) -> None:
    assert_same(run_both(workload, MoKConfig(mode=plan, **options)), expected)


@pytest.mark.parametrize("seed", range(12))
def test_random_orders(workload: Workload, expected: dict[str, Tensor], seed: int) -> None:
    config = MoKConfig(mode=PLANS[5 * seed % 16], wire=["bf16", "mxfp8"][seed % 2], **SMALL_RING)
    assert_same(run_both(workload, config, order="random", seed=seed, num_workers=1 + seed % 5), expected)


@pytest.mark.parametrize("plan", SOME_PLANS)
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_threads(workload: Workload, expected: dict[str, Tensor], plan: str, wire: str) -> None:
    config = MoKConfig(mode=plan, wire=wire, **SMALL_RING)
    assert_same(run_both(workload, config, executor="threads", num_workers=3), expected)


def test_recomputed_context(workload: Workload, expected: dict[str, Tensor]) -> None:
    for config in (MoKConfig(), MoKConfig(mode="split", wire="mxfp8", **SMALL_RING), MoKConfig(dispatch="push")):
        assert_same(run_both(workload, config, recompute=True), expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_outputs_do_not_depend_on_the_number_of_ranks(
    workload: Workload, expected: dict[str, Tensor], num_ranks: int
) -> None:
    def split(parts: list[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in torch.cat(parts).tensor_split(num_ranks)]

    regrouped = dataclasses.replace(
        workload,
        x=split(workload.x),
        expert_ids=split(workload.expert_ids),
        router_weights=split(workload.router_weights),
    )
    assert_same(run_both(regrouped, MoKConfig(wire="mxfp8")), expected, ("output",))


def test_halves_a_context_used_twice_and_main_grads(workload: Workload, expected: dict[str, Tensor]) -> None:
    config = MoKConfig(wire="mxfp8", **FULL_RING)

    def step(member: Any) -> list[bool]:
        workspace = workspace_for(workload, member, config)
        tables = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, tables)
        whole = backward(workload, workspace, config, tables, context)
        d_x, d_weights, saved = backward(
            workload, workspace, config, tables, context, function=functional.backward_dgrad
        )
        kept = {name: tensor.clone() for name, tensor in saved.named_tensors().items()}
        rank = member.rank()
        weights = weights_of(workload, member, for_backward=True)
        args = (config, workspace, tables, context, saved, d_outputs(workload)[rank], workload.x[rank], *weights)
        halves = [functional.backward_wgrad(*args) for _ in range(2)]
        mine = workload.weights.of_rank(rank, member.size())
        order = ("shared_gate", "routed_gate", "shared_up", "routed_up", "shared_down", "routed_down")
        main_grads = [torch.zeros(getattr(mine, name).shape) for name in order]
        assert backward(workload, workspace, config, tables, context, main_grads=main_grads)[2:] == (None,) * 6
        by_name = dict(zip(GRADIENTS[2:], whole[2:], strict=True))
        return [
            same_bits(d_x, whole[0]),
            torch.equal(d_weights, whole[1]),
            *(same_bits(a, b) for half in halves for a, b in zip(half, whole[2:], strict=True)),
            *(same_bits(kept[name], tensor) for name, tensor in saved.named_tensors().items()),
            *(torch.equal(g.bfloat16(), by_name[name]) for g, name in zip(main_grads, order, strict=True)),
        ]

    for checks in LocalGroup(workload.num_ranks).run(step):
        assert all(checks)


def test_both_precisions_and_zero_copy_on_one_workspace(workload: Workload, expected: dict[str, Tensor]) -> None:
    config, quantizing = MoKConfig(mode="split", **SMALL_RING), MoKConfig(wire="mxfp8")

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(workload, member, config)
        tables = build(workload, workspace, config)
        outputs = [forward(workload, workspace, config, tables, is_mxfp8=i % 2 == 0)[0] for i in range(4)]
        other = workspace_for(workload, member, quantizing)
        x = other.x[: len(workload.x[member.rank()])].copy_(workload.x[member.rank()])
        weights = workload.router_weights[member.rank()], *weights_of(workload, member)
        tables = build(workload, other, quantizing)
        return [*outputs, functional.forward(quantizing, other, tables, x, *weights, save_context=False)[0]]

    first, bf16, second, bf16_again, zero_copy = (
        torch.cat(parts) for parts in zip(*LocalGroup(workload.num_ranks).run(step), strict=True)
    )
    for output in (first, second, zero_copy):
        assert same_bits(output, expected["output"])
    assert same_bits(bf16, bf16_again) and not same_bits(bf16, first)


def test_the_wire_carries_half_the_bytes(workload: Workload) -> None:
    def num_bytes(wire: str) -> int:
        config = MoKConfig(wire=wire)

        def step(member: Any) -> int:
            workspace = workspace_for(workload, member, config)
            forward(workload, workspace, config, build(workload, workspace, config))
            return sum(row["num_bytes"] for row in workspace.stage_stats() if row["name"] == "dispatch")

        return sum(LocalGroup(workload.num_ranks).run(step))

    rows = sum(int((ids >= 0).sum()) for ids in workload.expert_ids)
    row_bytes = SIZES["H"] + 16  # 4 scales, to the next 16 bytes
    assert num_bytes("bf16") == rows * 4 * SIZES["H"]
    assert num_bytes("mxfp8") == rows * (row_bytes + 2 * SIZES["H"])


# ---- errors ----


def raised(workload: Workload, config: MoKConfig, change: Any, error: Any, match: str) -> None:
    """Forward of one rank with weights that `change` has been at."""

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        tables = build(workload, workspace, config)
        weights = weights_of(workload, member)
        change(weights)
        functional.forward(config, workspace, tables, workload.x[0], workload.router_weights[0], *weights)

    with pytest.raises(error, match=match):
        LocalGroup(1).run(step)


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
        run_both(workload, MoKConfig(wire="mxfp8"), is_mxfp8=False)


def test_ranks_of_two_precisions_are_told() -> None:
    workload = make_mxfp8_workload([5, 6])
    config = MoKConfig()

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        forward(workload, workspace, config, build(workload, workspace, config), is_mxfp8=member.rank() == 0)

    with pytest.raises(MoKPeerError, match="precision"):
        LocalGroup(2).run(step)


def test_backward_wants_both_orientations() -> None:
    workload = make_mxfp8_workload([5])
    config = MoKConfig()

    def step(member: Any, change: Any) -> None:
        workspace = workspace_for(workload, member, config)
        tables = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, tables)
        weights = weights_of(workload, member, for_backward=True)
        change(weights)
        args = (d_outputs(workload)[0], workload.x[0], workload.router_weights[0], *weights)
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
            LocalGroup(1).run(lambda member, change=change: step(member, change))
