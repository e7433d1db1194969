"""Stages of a backward swapped for torch functions: gradients, bits, plans, halves, main_grads, and what goes wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FULL_RING,
    SMALL_RING,
    assert_gradients_right,
    assert_same,
    backward,
    build,
    call_both,
    forward,
    make_layer,
    make_workload,
    run_both,
    same_bits,
    weights_of,
    workspace_for,
)
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, functional, stages
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload

NAMES = ("reverse_combine", "grouped_dgrad", "swiglu_backward", "reverse_dispatch", "wgrad", "reduce")
COPIES = ("reverse_combine", "reverse_dispatch", "reduce")
"""Their references have the very bits of the kernels; products of torch are summed in another order, and its sigmoid is
another one."""
MODES = {
    "reverse_combine": "dispatch+gate_up+swiglu+down|combine",
    "grouped_dgrad": "split",
    "swiglu_backward": "dispatch+gate_up|swiglu|down+combine",
    "reverse_dispatch": "dispatch|gate_up+swiglu+down+combine",
    "wgrad": "dispatch|gate_up+swiglu+down+combine",
    "reduce": "fused",
}
"""For each stage a plan in whose mirror it stands alone and as much as possible does not."""


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Several macrobatches of 256 rows a rank, experts that straddle their boundaries, a rank without tokens."""
    return make_workload([150, 3, 0, 247], K=3, seed=1)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> list[dict[str, Tensor]]:
    return run_both(workload)


def counted(name: str, calls: list[str], function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    function = function or getattr(stages, name).reference

    def f(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return f


def ten_line_wgrad(left: Tensor, right: Tensor, start: Tensor, count: Tensor, carry: Tensor | None = None) -> Tensor:
    """As anybody would write it."""
    sums = torch.zeros(len(count), left.shape[1], right.shape[1]) if carry is None else carry.clone()
    for expert in range(len(count)):
        rows = slice(int(start[expert]), int(start[expert] + count[expert]))
        sums[expert] += left[rows].float().T @ right[rows].float()
    return sums


# ---- right ----


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("mode", ["split", "widest"])
@pytest.mark.parametrize("name", NAMES)
def test_reference_in_place_of_a_stage(
    workload: Workload, expected: list[dict[str, Tensor]], name: str, mode: str, executor: str
) -> None:
    calls: list[str] = []
    plan = MODES[name] if mode == "widest" else "split"
    config = MoKConfig(mode=plan, **SMALL_RING, stages={name: counted(name, calls)})
    results = run_both(workload, config, executor=executor)
    # On each rank once a generation (there are several), grouped_dgrad twice, wgrad three times; reduce once a call.
    num_ranks, num_calls = 4, {"grouped_dgrad": 2, "wgrad": 3}.get(name, 1)
    assert len(calls) == 2 * num_ranks if name == "reduce" else len(calls) >= 2 * num_ranks * num_calls
    assert_gradients_right(workload, results)
    if name in COPIES:
        for mine, theirs in zip(results, expected, strict=True):
            assert_same(mine, theirs)


def test_wgrad_of_ten_lines(workload: Workload) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, stages={"wgrad": ten_line_wgrad})
    assert_gradients_right(workload, run_both(workload, config))


@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_one_carry_comes_as_another_leaves(executor: str) -> None:
    """Experts of three row blocks each and a ring of two: the second generation ends one and begins the other."""
    workload = make_workload([600], E=2, K=1, routing=lambda _rank, count, _: (torch.arange(count) % 2)[:, None])
    seen: list[Tensor | None] = []

    def wgrad(*args: Any) -> Tensor:
        seen.append(args[4])
        return ten_line_wgrad(*args)

    config = MoKConfig(mode="split", **SMALL_RING, stages={"wgrad": wgrad})
    assert_gradients_right(workload, run_both(workload, config, executor=executor))
    assert [carry is None for carry in seen] == [True] * 3 + [False] * 6
    assert [[bool(part.any()) for part in carry] for carry in seen[3::3] if carry is not None] == [
        [True, False],
        [False, True],
    ]


def test_the_whole_layer_in_torch(workload: Workload) -> None:
    """Both passes, every stage that can be swapped; twice on one workspace."""
    names = {*NAMES, "dispatch", "grouped_gemm", "swiglu", "combine"}
    config = MoKConfig(mode="split", **SMALL_RING, stages={name: getattr(stages, name).reference for name in names})

    def step(member: Any) -> list[dict[str, Tensor]]:
        workspace = workspace_for(workload, member, config)
        return [call_both(workload, workspace, config) for _ in range(2)]

    first, second = zip(*LocalGroup(4).run(step), strict=True)
    assert_gradients_right(workload, first)
    for mine, theirs in zip(first, second, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row_block", [128, 256])
def test_counts_that_differ(name: str, row_block: int) -> None:
    """No tokens, no rows, one row, one hot expert: a function is called only where there is something to do, and
    experts without rows get exact zeros."""
    workload = make_workload([0, 1, 130, 40], E=8, K=2, routing=lambda rank, count, _: torch.ones(count, 2).int())
    for ring in (SMALL_RING, FULL_RING):
        if row_block == 256:
            ring = {**ring, "minibatch_size": 256}
        config = MoKConfig(mode="split", row_block=row_block, **ring, stages={name: getattr(stages, name).reference})
        results = run_both(workload, config)
        assert_gradients_right(workload, results)
        for rank, result in enumerate(results):
            for gradient in (result["d_routed_gate"], result["d_routed_up"], result["d_routed_down"]):
                assert same_bits(gradient[0], torch.zeros_like(gradient[0]))
                assert bool(gradient[1].any()) == (rank == 0)


@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_a_limit(limit: float) -> None:
    workload = make_workload([90, 60], K=2, swiglu_limit=limit)
    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu_backward": stages.swiglu_backward.reference})
    assert_gradients_right(workload, run_both(workload, config))


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_library_quantizes_around_a_function(name: str, wire: str) -> None:
    workload = make_workload([150, 140], E=6, K=3, H=128, I=256, S=384, precision="mxfp8")
    for ring in (SMALL_RING, FULL_RING):
        options: dict[str, Any] = {"mode": "split", "wire": wire, **ring}
        given = run_both(workload, MoKConfig(**options, stages={name: getattr(stages, name).reference}))
        for mine, theirs in zip(given, run_both(workload, MoKConfig(**options)), strict=True):
            if name in COPIES:
                assert_same(mine, theirs)
            for key, gradient in mine.items():  # without its quantization it would be percents
                distance = (gradient.double() - theirs[key].double()).norm()
                assert float(distance) <= 2e-3 * float(theirs[key].double().norm()), (name, key)


def test_dgrad_gets_weights_quantized_along_its_own_axis() -> None:
    """Rows of the gate weight so unlike that what is quantized along a column loses the small ones, which along a row
    would stay."""
    workload = make_workload([150, 140], E=6, K=3, H=128, I=256, S=384, precision="mxfp8")
    scale = torch.exp2(-(torch.arange(256) % 32).float())[:, None].bfloat16()
    weights = dataclasses.replace(workload.weights, routed_gate=workload.weights.routed_gate * scale)
    workload = dataclasses.replace(workload, weights=weights)
    seen = []

    def grouped_dgrad(rows: Any, weight: Any, start: Tensor, count: Tensor) -> Tensor:
        if not isinstance(weight, Tensor):
            seen.append(float((weight[0] == 0).double().mean()))
        return stages.grouped_dgrad.reference(rows, weight, start, count)

    run_both(workload, MoKConfig(mode="split", **SMALL_RING, stages={"grouped_dgrad": grouped_dgrad}))
    assert min(seen) > 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_main_grads(workload: Workload, dtype: torch.dtype) -> None:
    """One addition to the caller's tensors, none where an expert has no rows."""
    order = ("d_shared_gate", "d_routed_gate", "d_shared_up", "d_routed_up", "d_shared_down", "d_routed_down")

    def gradients(config: MoKConfig) -> list[list[Tensor]]:
        def step(member: Any) -> list[Tensor]:
            workspace = workspace_for(workload, member, config)
            schedule = build(workload, workspace, config)
            _, context = forward(workload, workspace, config, schedule)
            s_gate, s_up, s_down, gate, up, down = weights_of(workload, member)
            shapes = (s_gate.shape, gate.shape, s_up.shape, up.shape, s_down.shape, down.shape)
            generator = torch.Generator().manual_seed(5)
            main = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            backward(workload, workspace, config, schedule, context, main_grads=main)
            return main

        return LocalGroup(4).run(step)

    swapped = gradients(MoKConfig(mode="split", **SMALL_RING, stages={"wgrad": stages.wgrad.reference}))
    for mine, theirs in zip(swapped, gradients(MoKConfig(mode="split", **SMALL_RING)), strict=True):
        for name, a, b in zip(order, mine, theirs, strict=True):
            step = torch.finfo(dtype).eps * b.float().abs() + 1e-4
            assert bool(((a.float() - b.float()).abs() <= 2 * step).all()), name


@pytest.mark.parametrize("name", NAMES)
def test_halves(workload: Workload, name: str) -> None:
    """dgrad and wgrad called apart take the functions of their own half."""
    calls: list[str] = []
    config = MoKConfig(mode="split", **FULL_RING, stages={name: counted(name, calls)})

    def step(member: Any) -> dict[str, Tensor]:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        output, context = forward(workload, workspace, config, schedule)
        weights = weights_of(workload, member)
        d_output, x = workload.d_outputs()[rank], workload.x[rank]
        d_x, d_router, kept = functional.backward_dgrad(
            config, workspace, schedule, context, d_output, x, workload.router_weights[rank], *weights
        )
        found = functional.backward_wgrad(config, workspace, schedule, context, kept, d_output, x, *weights)
        names = ("d_routed_gate", "d_routed_up", "d_routed_down", "d_shared_gate", "d_shared_up", "d_shared_down")
        gradients = {key: value for key, value in zip(names, found, strict=True) if value is not None}
        return {"output": output, "d_x": d_x, "d_router_weights": d_router, **gradients}

    assert_gradients_right(workload, LocalGroup(4).run(step))
    assert calls


def test_push_dispatch_and_pull_combine(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    """A backward goes the same way whatever its forward did, so its stages can be swapped there too."""
    names = set(NAMES) - {"reduce"}
    for options in ({"dispatch": "push"}, {"combine": "pull"}):
        swapped = {name: getattr(stages, name).reference for name in names}
        results = run_both(workload, MoKConfig(mode="split", **FULL_RING, **options, stages=swapped))
        assert_gradients_right(workload, results)
        for mine, theirs in zip(results, expected, strict=True):
            assert same_bits(mine["output"], theirs["output"])


def test_in_training(workload: Workload) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, stages={"wgrad": ten_line_wgrad})

    def step(member: Any) -> dict[str, Tensor]:
        rank = member.rank()
        layer = make_layer(workload, member, config)
        x = workload.x[rank].clone().requires_grad_()
        weights = workload.router_weights[rank].clone().requires_grad_()
        layer(x, workload.expert_ids[rank], weights).backward(workload.d_outputs()[rank])
        found = {f"d_{name.removeprefix('w_')}": p.grad for name, p in layer.named_parameters()}
        return {"d_x": x.grad, "d_router_weights": weights.grad, **found}

    assert_gradients_right(workload, LocalGroup(4).run(step))


# ---- plans ----


def test_every_plan_takes_or_refuses(workload: Workload) -> None:
    """Refused exactly where the mirrored plan has the stage beside another one."""
    for plan in all_plans():
        for name, function in ((name, getattr(stages, name).reference) for name in NAMES):
            wanted = {"grouped_dgrad": ("down_dgrad", "gate_up_dgrad")}.get(name, (name,))
            is_alone = all((stage,) in plan.backward_groups for stage in wanted)
            if name in ("wgrad", "reduce"):
                is_alone = name == "reduce" or not plan.is_fused
            if is_alone:
                MoKConfig(mode=str(plan), stages={name: function})
            else:
                with pytest.raises(ValueError, match="must stand alone in its kernel"):
                    MoKConfig(mode=str(plan), stages={name: function})


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("swiglu_backward", "dispatch|gate_up|swiglu+down|combine", r"it is in down_dgrad\+swiglu_backward; in mode"),
        (
            "grouped_dgrad",
            "dispatch+gate_up|swiglu|down|combine",
            r"gate_up_dgrad.*it is in gate_up_dgrad\+reverse_disp",
        ),
        ("wgrad", "fused", r"wgrad.*it is in dispatch\+gate_up\+reverse_combine\+.*\+quantize\+wgrad; in mode 'split'"),
        ("down_dgrad", "split", r"stages can be .*wgrad; got 'down_dgrad' \(swapped by 'grouped_dgrad'\)"),
        ("backward", "split", r"stages can be dispatch, .*wgrad; got 'backward'$"),
    ],
)
def test_what_is_refused_says_why(name: str, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoKConfig(mode=mode, stages={name: len})


# ---- wrong functions ----


def wrong(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(getattr(stages, name).reference(*args, **kwargs))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("wgrad", lambda sums: sums.bfloat16(), r"wgrad must return the float32 sums.*\[El, M, N\] = \[2, 128, 64\]"),
        ("wgrad", lambda sums: sums.mT, r"for the gate weight, got torch.float32 \[2, 64, 128\]"),
        ("wgrad", lambda sums: None, "got NoneType"),
        ("reverse_combine", lambda out: out[:1], "must return one pair per rank, 4, got list of 1"),
        ("reverse_combine", lambda out: [rows for rows, _ in out], "weights of the rows.*2, got torch.bfloat16"),
        ("reverse_combine", lambda out: [(d, w.double()) for d, w in out], "weights of the rows must be float32 of at"),
        ("grouped_dgrad", lambda d: d.float(), "grouped_dgrad must return bfloat16 rows, got torch.float32"),
        ("grouped_dgrad", lambda d: d[:, :32], r"grouped_dgrad must return at least \[\d+, \d+\], got"),
        ("swiglu_backward", lambda out: out[:3], r"\(d_gate, d_up, weighted_hidden, d_router\), 4, got tuple of 3"),
        (
            "swiglu_backward",
            lambda out: (*out[:3], out[3].sum(1)),
            "swiglu_backward: d_router must return float32 rows",
        ),
        ("reverse_dispatch", lambda out: [(d, r.bfloat16()) for d, r in out], "d_router cells must be float32"),
        ("reverse_dispatch", lambda out: [(d[:0], r) for d, r in out], "d_x cells must return at least"),
    ],
)
def test_wrong_results_are_named(workload: Workload, name: str, change: Any, message: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, stages={name: wrong(name, change)})
    with pytest.raises(ValueError, match=message) as caught:
        run_both(workload, config)
    assert any(
        f"in stages['{name}']" in note and f"called as mok_modular.stages.{name}.reference(" in note
        for note in caught.value.__notes__
    )


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"reduce"}))
def test_an_exception_in_a_function(workload: Workload, name: str, executor: str) -> None:
    """Raised on its rank with stage and rank, told to the others; gradients are NaN, and after a reset all is well."""
    config = MoKConfig(mode="split", **SMALL_RING, stages={name: wrong(name, lambda _: 1 / 0)})
    good = MoKConfig(mode="split", **SMALL_RING)
    seen: list[str] = []

    def step(member: Any) -> dict[str, Tensor]:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        with pytest.raises((ZeroDivisionError, MoKPeerError), match="division by zero") as caught:
            backward(workload, workspace, config, schedule, context)
        if isinstance(caught.value, MoKPeerError):
            assert f"(in stages['{name}']" in str(caught.value)
            assert f"on rank {caught.value.rank})" in str(caught.value)
        else:
            seen.append(caught.value.__notes__[0])
            assert f"on rank {member.rank()};" in seen[-1]
        workspace.reset()
        return call_both(workload, workspace, good)

    assert_gradients_right(workload, LocalGroup(4, executor=executor).run(step))
    assert seen
