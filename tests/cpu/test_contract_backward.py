"""The contracts of a backward's stages: our own keep them, and what breaks a rule is told which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_modular import stages
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.testing import check_stage
from mok_modular.testing.contract import RULES

NAMES = ("reverse_combine", "grouped_dgrad", "swiglu_backward", "reverse_dispatch", "wgrad")


@pytest.mark.parametrize("which", ["reference", "launch"])
@pytest.mark.parametrize("name", NAMES)
def test_our_own_stages_keep_the_contract(name: str, which: str) -> None:
    report = check_stage(name, getattr(getattr(stages, name), which))
    assert report.is_ok, str(report)
    assert "BROKEN" not in str(report)


def test_torch_alone_keeps_it() -> None:
    """What a user would write without looking at ours."""

    def swiglu_backward(
        d_hidden: Tensor, gate: Tensor, up: Tensor, weights: Tensor, limit: float | None = None, *, num_rows: Any = None
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            g, u = gate.float().requires_grad_(), up.float().requires_grad_()
            clamped = (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))
            h = torch.nn.functional.silu(clamped[0]) * clamped[1]
        d_gate, d_up = torch.autograd.grad(h, (g, u), d_hidden.float() * weights[:, None])
        h = h.detach().bfloat16().float()
        d_router = (d_hidden.float() * h).unflatten(1, (-1, 32)).sum(2)
        return d_gate.bfloat16(), d_up.bfloat16(), (weights[:, None] * h).bfloat16(), d_router

    report = check_stage("swiglu_backward", swiglu_backward)
    assert report.broken in ([], ["limit"]), str(report)  # torch.clamp passes no gradient at equality in 2.14

    def wgrad(left: Tensor, right: Tensor, start: Tensor, count: Tensor, carry: Tensor | None = None) -> Tensor:
        ends = zip(start.tolist(), count.tolist(), strict=False)
        rows = [(left[a : a + n].float(), right[a : a + n].float()) for a, n in ends]
        sums = torch.stack([a.T @ b for a, b in rows])
        return sums if carry is None else carry + sums

    report = check_stage("wgrad", wgrad)
    assert report.is_ok, str(report)


def reference(name: str) -> Callable[..., Any]:
    return getattr(stages, name).reference


def test_a_function_is_called_as_in_a_layer() -> None:
    """With all arguments: one without defaults is right too."""

    def swiglu_backward(d_h: Tensor, gate: Tensor, up: Tensor, weights: Tensor, limit: Any, num_rows: Tensor) -> Any:
        return stages.swiglu_backward.reference(d_h, gate, up, weights, limit, num_rows=num_rows)

    def wgrad(left: Tensor, right: Tensor, start: Tensor, count: Tensor, carry: Tensor | None) -> Tensor:
        return stages.wgrad.reference(left, right, start, count, carry)

    for function in (swiglu_backward, wgrad):
        report = check_stage(function.__name__, function)
        assert report.is_ok, str(report)


# ---- reverse_combine and reverse_dispatch ----


def leaves_padding(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    out = reference("reverse_combine")(d_outputs, weights, tables, topk=topk)
    for (d_y, _), table in zip(out, tables, strict=True):
        d_y[table.peer_rank[: len(d_y)] < 0] = 1.0
    return out


def leaves_padding_weights(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    out = reference("reverse_combine")(d_outputs, weights, tables, topk=topk)
    return [(d_y, w.where(w != 0, 1.0)) for d_y, w in out]


def forgets_the_weights(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    return [(d_y, torch.ones_like(w)) for d_y, w in reference("reverse_combine")(d_outputs, weights, tables, topk=topk)]


def multiplies_by_the_weights(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    out = reference("reverse_combine")(d_outputs, weights, tables, topk=topk)
    return [((w[:, None] * d_y).bfloat16(), w) for d_y, w in out]


def weights_in_bfloat16(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    out = reference("reverse_combine")(d_outputs, weights, tables, topk=topk)
    return [(d_y, w.bfloat16()) for d_y, w in out]


def weights_of_the_first_route(d_outputs: Any, weights: Any, tables: Any, *, topk: int) -> Any:
    first = [w[:, :1].expand_as(w).nan_to_num() for w in weights]
    return reference("reverse_combine")(d_outputs, first, tables, topk=topk)


def sums_in_bfloat16(d_xs: Any, partials: Any, tables: Any) -> Any:
    out = reference("reverse_dispatch")(d_xs, [p.bfloat16().float() for p in partials], tables)
    return [(cells, d_router.bfloat16().float()) for cells, d_router in out]


def first_group_only(d_xs: Any, partials: Any, tables: Any) -> Any:
    return reference("reverse_dispatch")(d_xs, [p[:, :1] for p in partials], tables)


def other_cells(d_xs: Any, partials: Any, tables: Any) -> Any:
    return [(cells.roll(1, 0), d_router) for cells, d_router in reference("reverse_dispatch")(d_xs, partials, tables)]


def sums_all_routes(d_xs: Any, partials: Any, tables: Any) -> Any:
    out = reference("reverse_dispatch")(d_xs, partials, tables)
    return [(cells, d_router + 0 * sum(p.sum() for p in partials)) for cells, d_router in out]  # NaN of the padding


# ---- grouped_dgrad ----


def each(f: Callable[..., Tensor], rows: Any, weight: Any) -> Tensor:
    """f of the one product, or the sum of both."""
    if isinstance(rows, Tensor):
        return f(rows, weight)
    return f(rows[0], weight[0]) + f(rows[1], weight[1])


def rounds_each_product(rows: Any, weight: Any, start: Tensor, counts: Tensor) -> Tensor:
    return each(lambda r, w: reference("grouped_dgrad")(r, w, start, counts), rows, weight)


def gate_alone(rows: Any, weight: Any, start: Tensor, counts: Tensor) -> Tensor:
    pair = (rows, weight) if isinstance(rows, Tensor) else (rows[0], weight[0])
    return reference("grouped_dgrad")(*pair, start, counts)


def reads_padding(rows: Any, weight: Any, start: Tensor, counts: Tensor) -> Tensor:
    return reference("grouped_dgrad")(rows, weight, start, start.diff())


def first_expert_always(rows: Any, weight: Any, start: Tensor, counts: Tensor) -> Tensor:
    same = weight[:1].expand_as(weight) if isinstance(weight, Tensor) else tuple(w[:1].expand_as(w) for w in weight)
    return reference("grouped_dgrad")(rows, same, start, counts)


def by_position(rows: Any, weight: Any, start: Tensor, counts: Tensor) -> Tensor:
    """Every other row is summed the other way round."""
    out = reference("grouped_dgrad")(rows, weight, start, counts)
    if isinstance(rows, Tensor):
        out[1::2] = reference("grouped_dgrad")(rows.flip(1), weight.flip(1), start, counts)[1::2]
    return out


# ---- swiglu_backward ----


def swiglu_backward(**changed: Callable[..., Any]) -> Callable[..., Any]:
    """The formula with one of its steps replaced."""

    def f(d_h: Tensor, gate: Tensor, up: Tensor, w: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Any:
        d, g, u, w = d_h.float(), gate.float(), up.float(), w[:, None]
        gate_passes, up_passes = torch.ones_like(g).bool(), torch.ones_like(u).bool()
        if limit is not None:
            gate_passes, up_passes = changed.get("passes", lambda g, u, m: (g <= m, u.abs() <= m))(g, u, limit)
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        s = g.sigmoid()
        h = changed.get("hidden", lambda h: h.bfloat16().float())(g * s * u)
        weighted = changed.get("weighted", lambda d, w: d * w)(d, w)
        slope = changed.get("slope", lambda g: g.sigmoid() * (1 + g * (1 - g.sigmoid())))(g)
        d_gate, d_up = torch.where(gate_passes, weighted * u * slope, 0), torch.where(up_passes, weighted * g * s, 0)
        d_router = (changed.get("router", lambda d, w: d)(d, w) * h).unflatten(1, (-1, 32)).sum(2)
        d_router = changed.get("groups", lambda groups: groups)(d_router)
        return d_gate.bfloat16(), d_up.bfloat16(), (w * h).bfloat16(), d_router

    return f


def overflowing_slope(g: Tensor) -> Tensor:
    e = g.exp()
    return e / (1 + e) * (1 + g / (1 + e))


def test_the_formula_keeps_the_contract() -> None:
    report = check_stage("swiglu_backward", swiglu_backward())
    assert report.is_ok, str(report)


# ---- wgrad ----


def rounds_the_sums(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    return reference("wgrad")(left, right, start, counts, carry).bfloat16().float()


def rounded_dtype(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    return reference("wgrad")(left, right, start, counts, carry).bfloat16()


def sums_padding(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    return reference("wgrad")(left, right, start, start.diff(), carry)


def forgets_the_carry(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Any = None) -> Tensor:
    return reference("wgrad")(left, right, start, counts)


def rounds_the_carry(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    return reference("wgrad")(left, right, start, counts, None if carry is None else carry.bfloat16().float())


def writes_its_carry(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    sums = reference("wgrad")(left, right, start, counts, carry)
    return sums if carry is None else carry.copy_(sums)


def leaves_empty_experts(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Any = None) -> Tensor:
    sums = reference("wgrad")(left, right, start, counts, carry)
    sums[counts == 0] = 1.0
    return sums


def mean_of_rows(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    return reference("wgrad")(left, right, start, counts, carry) / counts[:, None, None]


def first_segment_always(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Any = None) -> Tensor:
    whole = torch.full_like(counts, int(counts.max()))
    return reference("wgrad")(left.nan_to_num(), right.nan_to_num(), torch.zeros_like(start), whole.clamp(max=0), carry)


def by_expert(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    """Every other expert's rows in descending order, in steps."""
    sums = reference("wgrad")(left, right, start, counts, carry)
    for expert in range(1, len(counts), 2):
        rows = range(int(start[expert]), int(start[expert] + counts[expert]))
        total = torch.zeros_like(sums[0]) if carry is None else carry[expert].clone()
        for row in reversed(rows):
            total += left[row, :, None].float() * right[row, None, :].float()
        sums[expert] = total
    return sums


def random_bits(left: Tensor, right: Tensor, start: Tensor, counts: Tensor, carry: Tensor | None = None) -> Tensor:
    sums = reference("wgrad")(left, right, start, counts, carry)
    return sums * (1 + 2.0**-23 * torch.randint(0, 2, sums.shape))


@pytest.mark.parametrize(
    ("name", "function", "rule"),
    [
        ("reverse_combine", leaves_padding, "padding"),
        ("reverse_combine", leaves_padding_weights, "padding"),
        ("reverse_combine", forgets_the_weights, "values"),
        ("reverse_combine", multiplies_by_the_weights, "values"),
        ("reverse_combine", weights_in_bfloat16, "shape"),
        ("reverse_combine", weights_of_the_first_route, "values"),
        ("reverse_dispatch", sums_in_bfloat16, "rounding"),
        ("reverse_dispatch", first_group_only, "values"),
        ("reverse_dispatch", other_cells, "values"),
        ("reverse_dispatch", sums_all_routes, "unread"),
        ("grouped_dgrad", rounds_each_product, "rounding"),
        ("grouped_dgrad", gate_alone, "values"),
        ("grouped_dgrad", reads_padding, "padding"),
        ("grouped_dgrad", first_expert_always, "values"),
        ("grouped_dgrad", by_position, "order"),
        ("swiglu_backward", swiglu_backward(weighted=lambda d, w: d), "router weight"),
        ("swiglu_backward", swiglu_backward(router=lambda d, w: d * w), "router weight"),
        ("swiglu_backward", swiglu_backward(weighted=lambda d, w: (d * w).bfloat16().float()), "rounding"),
        ("swiglu_backward", swiglu_backward(hidden=lambda h: h), "rounding"),
        ("swiglu_backward", swiglu_backward(passes=lambda g, u, m: (g < m, u.abs() < m)), "limit"),
        ("swiglu_backward", swiglu_backward(passes=lambda g, u, m: (g <= m, u <= m)), "limit"),
        ("swiglu_backward", swiglu_backward(passes=lambda g, u, m: (g < 1e38, u < 1e38)), "limit"),
        ("swiglu_backward", swiglu_backward(slope=lambda g: g.sigmoid()), "values"),
        ("swiglu_backward", swiglu_backward(slope=overflowing_slope), "range"),
        ("swiglu_backward", swiglu_backward(groups=lambda groups: groups.sum(1)), "shape"),
        ("wgrad", rounds_the_sums, "rounding"),
        ("wgrad", rounded_dtype, "shape"),
        ("wgrad", sums_padding, "unread"),
        ("wgrad", forgets_the_carry, "carry"),
        ("wgrad", rounds_the_carry, "carry"),
        ("wgrad", writes_its_carry, "inputs unchanged"),
        ("wgrad", leaves_empty_experts, "empty"),
        ("wgrad", mean_of_rows, "empty"),
        ("wgrad", mean_of_rows, "values"),
        ("wgrad", first_segment_always, "values"),
        ("wgrad", by_expert, "order"),
        ("wgrad", random_bits, "repeatable"),
    ],
)
def test_a_broken_rule_is_named(name: str, function: Callable[..., Any], rule: str) -> None:
    report = check_stage(name, function)
    assert not report.is_ok
    assert rule in report.broken, str(report)
    assert "BROKEN" in str(report)


@pytest.mark.parametrize(
    ("name", "function", "rules"),
    [
        ("wgrad", rounds_the_carry, ["carry"]),
        ("wgrad", leaves_empty_experts, ["empty"]),
        ("wgrad", by_expert, ["order"]),
        ("grouped_dgrad", rounds_each_product, ["rounding"]),
        ("swiglu_backward", swiglu_backward(hidden=lambda h: h), ["rounding"]),
        ("swiglu_backward", swiglu_backward(weighted=lambda d, w: d), ["router weight"]),
        ("swiglu_backward", swiglu_backward(slope=overflowing_slope), ["range"]),
    ],
)
def test_and_no_other(name: str, function: Callable[..., Any], rules: list[str]) -> None:
    assert check_stage(name, function).broken == rules


def test_every_stage_that_can_be_swapped_has_a_contract() -> None:
    for name in SIGNATURES:
        report = check_stage(name, lambda *args, **kwargs: None)
        assert report.broken == ["shape"], name
    assert set(RULES) >= set(report.broken)
