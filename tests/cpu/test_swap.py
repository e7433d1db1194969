"""Stages swapped for torch functions, in layers and alone; the contract names the rule that a function breaks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FULL_RING,
    SMALL_RING,
    assert_right,
    build,
    call,
    forward,
    make_layer,
    make_workload,
    run,
    same_bits,
    weights_of,
    workspace_for,
)
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, functional, stages
from mok_modular.protocol.swap_rules import SIGNATURES, stages_of
from mok_modular.testing import Workload, check_stage

NAMES = ("dispatch", "grouped_gemm", "swiglu", "combine", "reduce")
MODES = {
    "dispatch": "dispatch|gate_up+swiglu|down+combine",
    "grouped_gemm": "split",
    "swiglu": "dispatch+gate_up|swiglu|down+combine",
    "combine": "dispatch+gate_up+swiglu+down|combine",
    "reduce": "fused",
}
"""For each stage a plan in which it stands alone and as much as possible does not."""


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


def counted(function: Callable[..., Any], calls: list[str], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def f(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return f


def test_signatures_are_those_of_the_references() -> None:
    assert all(stages_of().values())
    for name, given in SIGNATURES.items():
        parameters = inspect.signature(getattr(stages, name).reference).parameters.values()
        own = [each for each in parameters if each.name != "direction"]
        assert given == ", ".join(each.name + "=" * (each.kind is each.KEYWORD_ONLY) for each in own)


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("mode", ["split", "widest"])
@pytest.mark.parametrize("name", NAMES)
def test_reference_in_place_of_a_stage(workload: Workload, name: str, mode: str, executor: str) -> None:
    calls: list[str] = []
    swapped = {name: counted(getattr(stages, name).reference, calls, name)}
    plan = MODES[name] if mode == "widest" else "split"
    config = MoKConfig(mode=plan, **SMALL_RING, stages=swapped)
    output = run(workload, config, save_context=True, executor=executor)
    assert_right(workload, output)
    # Once a generation (and for grouped_gemm twice), reduce once a call, on each rank.
    assert len(calls) >= (2 if name == "reduce" else 4)
    if name not in ("grouped_gemm", "swiglu"):  # copies, and a reduce that rounds alike
        assert same_bits(output, run(workload, MoKConfig(mode=plan, **SMALL_RING)))


def test_all_at_once_and_again(workload: Workload) -> None:
    """Nothing of the library's own arithmetic but the shared expert; several calls on one workspace."""
    config = MoKConfig(mode="split", **SMALL_RING, stages={name: getattr(stages, name).reference for name in NAMES})

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(workload, member, config)
        return [call(workload, workspace, config) for _ in range(3)]

    first, second, third = (torch.cat(outputs) for outputs in zip(*LocalGroup(2).run(step), strict=True))
    assert_right(workload, first)
    assert same_bits(first, second)
    assert same_bits(first, third)


@pytest.mark.parametrize("name", NAMES)
def test_counts_that_differ(name: str) -> None:
    """No tokens, no rows, one row: the function is called only where there is something to do."""
    workload = make_workload([0, 1, 130, 40], E=4, K=2, routing=lambda rank, count, _: torch.ones(count, 2).int())
    for ring in (SMALL_RING, FULL_RING):
        config = MoKConfig(mode="split", **ring, stages={name: getattr(stages, name).reference})
        assert_right(workload, run(workload, config))


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("mode", ["split", MODES["dispatch"]])
def test_dispatch_without_peers(mode: str, precision: str) -> None:
    """One rank publishes nothing in a forward: the function gets the caller's own tokens."""
    workload = make_workload([140], E=3, K=2, H=128, I=256, S=128, precision=precision)
    options: dict[str, Any] = {"mode": mode, **SMALL_RING}
    got = run(workload, MoKConfig(**options, stages={"dispatch": stages.dispatch.reference}))
    assert same_bits(got, run(workload, MoKConfig(**options)))


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("grain", ["row_block", "minibatch"])
def test_dispatch_of_rows_that_come_once(grain: str, executor: str) -> None:
    """Tokens of several experts of a rank, in several row blocks: a function has no rows of its own to wait for."""
    routing = lambda rank, count, _: (torch.arange(count)[:, None] + torch.arange(3)) % 6  # noqa: E731
    workload = make_workload([400, 90], E=6, K=3, routing=routing)
    options: dict[str, Any] = {"mode": "split", **FULL_RING, "dispatch": "pull_once", "signal_grain": grain}
    swapped = MoKConfig(**options, stages={"dispatch": stages.dispatch.reference})
    assert same_bits(run(workload, swapped, executor=executor), run(workload, MoKConfig(**options)))


def test_window_and_number_of_rows(workload: Workload) -> None:
    """Sizes do not depend on the routing; the number of rows is a tensor."""
    seen = []

    def swiglu(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Tensor) -> Tensor:
        seen.append((len(gate), int(num_rows)))
        assert limit is None
        return stages.swiglu.reference(gate, up, limit, num_rows=num_rows)

    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu": swiglu})
    run(workload, config)
    assert {size for size, _ in seen} == {256}
    assert {count % 128 for _, count in seen} == {0}
    assert len({count for _, count in seen}) > 1


@pytest.mark.parametrize("which", ["reference", "launch"])
def test_rows_behind_the_last_come_out_as_zeros(which: str) -> None:
    gate, up = torch.full((5, 64), float("nan")).bfloat16(), torch.full((5, 64), float("nan")).bfloat16()
    gate[:2] = up[:2] = 1.0
    out = getattr(stages.swiglu, which)(gate, up, num_rows=torch.tensor(2))
    assert out[:2].ne(0).all()
    assert out[2:].eq(0).all()


def test_replay_takes_the_same_functions(workload: Workload) -> None:
    """A backward runs dispatch and gate_up again: with other gates than forward's the gradients would not fit."""

    def gradients(config: MoKConfig) -> list[tuple[Tensor, ...]]:
        def step(member: Any) -> tuple[Tensor, ...]:
            rank = member.rank()
            workspace = workspace_for(workload, member, config)
            schedule = build(workload, workspace, config)
            _, context = forward(workload, workspace, config, schedule)
            x, weights = workload.x[rank], workload.router_weights[rank]
            return functional.backward(
                config, workspace, schedule, context, x, x, weights, *weights_of(workload, member)
            )

        return LocalGroup(2).run(step)

    calls: list[str] = []
    swapped = {name: counted(getattr(stages, name).reference, calls, name) for name in ("dispatch", "grouped_gemm")}
    given = gradients(MoKConfig(mode="split", **SMALL_RING, stages=swapped))
    num_forward = 2 * 2  # ranks and generations
    assert calls.count("dispatch") > num_forward
    assert calls.count("grouped_gemm") > 2 * num_forward
    for a, b in zip(given, gradients(MoKConfig(mode="split", **SMALL_RING)), strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.allclose(one.float(), other.float(), rtol=0.1, atol=0.05 * float(other.float().abs().max()))


def test_in_a_layer(workload: Workload) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu": stages.swiglu.reference})

    def step(member: Any) -> Tensor:
        rank = member.rank()
        with torch.no_grad():
            layer = make_layer(workload, member, config)
            return layer(workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])

    assert_right(workload, torch.cat(LocalGroup(2).run(step)))


@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", ["dispatch", "swiglu"])
def test_the_library_quantizes_what_a_function_returns(name: str, wire: str) -> None:
    workload = make_workload([150, 140], E=6, K=3, H=128, I=256, S=384, precision="mxfp8")
    options: dict[str, Any] = {"mode": "split", "wire": wire, **SMALL_RING}
    want = run(workload, MoKConfig(**options))
    got = run(workload, MoKConfig(**options, stages={name: getattr(stages, name).reference}))
    if name == "dispatch":
        assert same_bits(got, want)
    # torch's sigmoid is a BF16 step away now and then; without the quantization of h it would be 2%.
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-3


@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_an_exception_in_a_function(workload: Workload, executor: str) -> None:
    """Raised on its rank, told to the others, and the workspace works again after a reset."""
    is_broken = True

    def swiglu(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Tensor) -> Tensor:
        if is_broken:
            raise KeyError("mine")
        return stages.swiglu.reference(gate, up, limit, num_rows=num_rows)

    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu": swiglu})
    good = MoKConfig(mode="split", **SMALL_RING)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        with pytest.raises((KeyError, MoKPeerError), match="mine"):
            call(workload, workspace, config)
        workspace.reset()
        return call(workload, workspace, good)

    assert_right(workload, torch.cat(LocalGroup(2, executor=executor).run(step)))
    with pytest.raises(KeyError, match="mine"):
        run(workload, config)


@pytest.mark.parametrize("executor", ["fibers", "threads"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
def test_what_is_no_ordinary_exception_hangs_nobody(
    workload: Workload, kind: type[BaseException], executor: str
) -> None:
    """sys.exit in a function, or pytest.fail: the peers hear of it, and a reset mends the workspace."""

    def swiglu(*_: Any, **__: Any) -> Tensor:
        raise kind("mine")

    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu": swiglu}, start_timeout_s=20)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        with pytest.raises((kind, MoKPeerError), match="mine"):
            call(workload, workspace, config)
        workspace.reset()
        return call(workload, workspace, MoKConfig(mode="split", **SMALL_RING))

    assert_right(workload, torch.cat(LocalGroup(2, executor=executor).run(step)))
    with pytest.raises(kind, match="mine"):
        run(workload, config, executor=executor)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda gate: None, "swiglu must return bfloat16 rows, got NoneType"),
        (lambda gate: gate.float(), r"got torch.float32 \[256, 128\]"),
        (lambda gate: gate[:3], r"at least \[\d+, 128\], got \[3, 128\]"),
        (lambda gate: gate[:, :64], r"got \[256, 64\]"),
    ],
)
def test_wrong_results_are_named(workload: Workload, result: Any, message: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, stages={"swiglu": lambda gate, up, limit, num_rows: result(gate)})
    with pytest.raises(ValueError, match=message):
        run(workload, config)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"stages": {"swiglu": len}},
            ValueError,
            "swiglu must stand alone in its kernel, in mode 'fused' it is in disp",
        ),
        ({"stages": {"gate_up": len}, "mode": "split"}, ValueError, "stages can be dispatch, grouped_gemm"),
        ({"stages": {"swiglu": 3}, "mode": "split"}, TypeError, "must be a function, got int"),
        ({"stages": [len], "mode": "split"}, TypeError, "stages must be a dict"),
        (
            {"stages": {"grouped_gemm": len}, "mode": "dispatch|gate_up|swiglu|down+combine"},
            ValueError,
            r"down must stand alone.*in down\+combine",
        ),
        ({"stages": {"dispatch": len}, "mode": "split", "dispatch": "push"}, ValueError, "got dispatch='push'"),
        ({"stages": {"combine": len}, "mode": "split", "combine": "pull"}, ValueError, "got combine='pull'"),
    ],
)
def test_wrong_stages(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        MoKConfig(**options)


def test_a_config_keeps_what_it_was_given() -> None:
    given: dict[str, Any] = {"swiglu": stages.swiglu.reference}
    config = MoKConfig(mode="split", stages=given)
    given["bogus"] = 3
    assert config.stages == {"swiglu": stages.swiglu.reference}
    assert config == MoKConfig(mode="split", stages={"swiglu": stages.swiglu.reference})


# ---- the contract ----


@pytest.mark.parametrize("which", ["reference", "launch"])
@pytest.mark.parametrize("name", NAMES)
def test_our_own_stages_keep_the_contract(name: str, which: str) -> None:
    report = check_stage(name, getattr(getattr(stages, name), which))
    assert report.is_ok, str(report)
    assert report.broken == []
    assert "BROKEN" not in str(report)


def reference(name: str) -> Callable[..., Any]:
    return getattr(stages, name).reference


def silu_twice_rounded(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    one_rounding = reference("swiglu")(gate, torch.ones_like(up), limit, num_rows=num_rows)
    if limit is not None:
        up = up.clamp(-limit, limit)
    return one_rounding * up.nan_to_num()


def upper_limit_only(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    if limit is not None:
        up = up.clamp(max=limit)
        gate = gate.clamp(max=limit)
    return reference("swiglu")(gate, up, None, num_rows=num_rows)


def limit_is_falsy(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    return reference("swiglu")(gate, up, limit or None, num_rows=num_rows)


def overflowing(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    out = reference("swiglu")(gate, up, limit, num_rows=num_rows)
    return out.where(gate > -80, math_nan(out))


def math_nan(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan"))


def in_bfloat16(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    """Partial sums rounded to bfloat16."""
    out = reference("grouped_gemm")

    def halves(w: Tensor) -> Tensor:
        half = rows.shape[1] // 2
        return out(rows[:, :half], w[..., :half], start, counts) + out(rows[:, half:], w[..., half:], start, counts)

    return halves(weight) if isinstance(weight, Tensor) else tuple(halves(w) for w in weight)


def reads_padding(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    full = start.diff()
    return reference("grouped_gemm")(rows, weight, start, full)


def leaves_padding(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    out = reference("grouped_gemm")(rows, weight, start, counts)

    def spoil(each: Tensor) -> Tensor:
        return each.where(each.ne(0).any(1, keepdim=True), 1.0).bfloat16()

    return spoil(out) if isinstance(out, Tensor) else tuple(spoil(each) for each in out)


def first_expert_always(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    def same(w: Tensor) -> Tensor:
        return w[:1].expand_as(w)

    return reference("grouped_gemm")(
        rows, same(weight) if isinstance(weight, Tensor) else tuple(same(w) for w in weight), start, counts
    )


def no_empty_segments(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    if int(counts.min()) == 0:
        raise RuntimeError("an expert without rows")
    return reference("grouped_gemm")(rows, weight, start, counts)


def by_position(rows: Tensor, weight: Any, start: Tensor, counts: Tensor) -> Any:
    """Every other row is summed the other way round."""

    def one(w: Tensor) -> Tensor:
        out = reference("grouped_gemm")(rows, w, start, counts)
        turned = reference("grouped_gemm")(rows.flip(1), w.flip(2), start, counts)
        out[1::2] = turned[1::2]
        return out

    return one(weight) if isinstance(weight, Tensor) else tuple(one(w) for w in weight)


def writes_its_input(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    out = reference("swiglu")(gate, up, limit, num_rows=num_rows)
    gate.copy_(out)
    return out


def reads_missing_routes(combined: Tensor, weights: Tensor, mask: Tensor, shared: Tensor | None) -> Tensor:
    return reference("reduce")(combined, weights, torch.ones_like(mask), shared)


def rounds_each_route(combined: Tensor, weights: Tensor, mask: Tensor, shared: Tensor | None) -> Tensor:
    rows = combined.view(*mask.shape, combined.shape[1])
    acc = torch.zeros_like(rows[:, 0]) if shared is None else shared
    for k in range(mask.shape[1]):
        step = (acc.float() + weights[:, k, None] * rows[:, k].float()).bfloat16()
        acc = step.where(mask[:, k, None], acc)
    return acc


def forgets_shared(combined: Tensor, weights: Tensor, mask: Tensor, shared: Tensor | None) -> Tensor:
    return reference("reduce")(combined, weights, mask, None)


def dispatch_leaves_padding(xs: Any, tables: Any, *, topk: int, direction: str = "pull") -> Any:
    out = reference("dispatch")(xs, tables, topk=topk)
    for rows, table in zip(out, tables, strict=True):
        rows[table.peer_rank[: len(rows)] < 0] = 1.0
    return out


def dispatch_ignores_topk(xs: Any, tables: Any, *, topk: int, direction: str = "pull") -> Any:
    return [rows.roll(1, 0) for rows in reference("dispatch")(xs, tables, topk=topk)]


def combine_in_float16(ys: Any, tables: Any, *, direction: str = "push") -> Any:
    return [cells.half().bfloat16() * 1.01 for cells in reference("combine")(ys, tables)]


def returns_float32(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    return reference("swiglu")(gate.float(), up.float(), limit, num_rows=num_rows)


def random_bits(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    out = reference("swiglu")(gate, up, limit, num_rows=num_rows)
    return (out.view(torch.int16) + torch.randint(0, 2, out.shape, dtype=torch.int16)).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "function", "rule"),
    [
        ("swiglu", silu_twice_rounded, "rounding"),
        ("swiglu", upper_limit_only, "limit"),
        ("swiglu", limit_is_falsy, "limit"),
        ("swiglu", overflowing, "range"),
        ("swiglu", writes_its_input, "inputs unchanged"),
        ("swiglu", returns_float32, "shape"),
        ("swiglu", random_bits, "repeatable"),
        ("grouped_gemm", in_bfloat16, "rounding"),
        ("grouped_gemm", reads_padding, "padding"),
        ("grouped_gemm", leaves_padding, "padding"),
        ("grouped_gemm", first_expert_always, "values"),
        ("grouped_gemm", no_empty_segments, "runs"),
        ("grouped_gemm", by_position, "order"),
        ("reduce", reads_missing_routes, "unread"),
        ("reduce", rounds_each_route, "rounding"),
        ("reduce", forgets_shared, "values"),
        ("dispatch", dispatch_leaves_padding, "padding"),
        ("dispatch", dispatch_ignores_topk, "values"),
        ("combine", combine_in_float16, "values"),
    ],
)
def test_a_broken_rule_is_named(name: str, function: Callable[..., Any], rule: str) -> None:
    report = check_stage(name, function)
    assert not report.is_ok
    assert rule in report.broken, str(report)
    assert "BROKEN" in str(report)


def test_a_function_is_called_as_in_a_layer() -> None:
    """With all arguments: one without defaults is right too."""

    def swiglu(gate: Tensor, up: Tensor, limit: float | None, num_rows: Tensor) -> Tensor:
        return reference("swiglu")(gate, up, limit, num_rows=num_rows)

    report = check_stage("swiglu", swiglu)
    assert report.is_ok, str(report)


def test_an_exception_where_order_is_looked_at_is_a_finding() -> None:
    def swiglu(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
        if len(gate) == 7:
            raise RuntimeError("seven rows")
        return reference("swiglu")(gate, up, limit, num_rows=num_rows)

    report = check_stage("swiglu", swiglu)
    assert report.broken == ["runs"]
    assert "order: RuntimeError: seven rows" in str(report)


def test_contract_arguments() -> None:
    with pytest.raises(ValueError, match="stages with a contract are dispatch"):
        check_stage("schedule", len)
    with pytest.raises(TypeError, match="f must be a function"):
        check_stage("swiglu", 3)
