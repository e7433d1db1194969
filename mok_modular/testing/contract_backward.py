"""The cases of the contracts of a backward's stages, and that the place of a row does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.registry import Registry
from mok_modular.testing.contract_case import (
    SEGMENTS,
    Case,
    Finding,
    compare,
    count_of,
    filled,
    random,
    route_cases,
    segments,
)

_COLUMNS = 32  # of h, that make one partial sum of d_router


# ---- the copies ----

CASES: Registry[Callable[[], Iterator[Case]]] = Registry()
"""What a stage is called with, and what it must give."""

ORDER: Registry[Callable[[Callable[..., Any]], Iterator[Finding]]] = Registry()
"""Calls that must give the same bits, where rows stand in another order; none for stages that only move rows."""


@CASES.add("reverse_combine")
def _reverse_combine_cases() -> Iterator[Case]:
    for i, (name, tokens, topk, tables) in enumerate(route_cases()):
        d_outputs = [random(count, 128, seed=20 * i + rank) for rank, count in enumerate(tokens)]
        weights = [random(count, topk, seed=50 + 20 * i + rank).float() / 3 for rank, count in enumerate(tokens)]
        for table, own in zip(tables, weights, strict=True):
            own.view(-1)[table.route_rank < 0] = math.nan
        exact, used = [], []
        for table in tables:
            num_rows = int(table.segment_start[-1])
            is_row = table.peer_rank[:num_rows] >= 0
            rows, row_weights = (torch.zeros(num_rows, *size, dtype=torch.float64) for size in ((128,), ()))
            for row in is_row.nonzero().squeeze(1).tolist():
                src, route = int(table.peer_rank[row]), int(table.peer_token_idx[row])
                rows[row] = d_outputs[src][route // topk].double()
                row_weights[row] = weights[src].view(-1)[route].double()
            exact += [rows, row_weights]
            used += [is_row, is_row]
        dtypes = [torch.bfloat16, torch.float32] * len(tables)
        arguments = (d_outputs, weights, tables)
        yield Case(name, arguments, {"topk": topk}, exact, used, is_padding_checked=True, dtypes=dtypes)


@CASES.add("reverse_dispatch")
def _reverse_dispatch_cases() -> Iterator[Case]:
    num_groups = 6
    for i, (name, _, _, tables) in enumerate(route_cases()):
        d_xs, partials = [], []
        for rank, table in enumerate(tables):
            num_rows = int(table.segment_start[-1])
            is_padding = table.peer_rank[:num_rows] < 0
            d_xs.append(random(num_rows, 128, seed=20 * i + rank))
            partials.append(random(num_rows, num_groups, seed=50 + 20 * i + rank).float() / 3)
            d_xs[-1][is_padding] = math.nan
            partials[-1][is_padding] = math.nan
        exact, used, slack = [], [], []
        for table in tables:
            routed = table.route_rank >= 0
            cells = torch.zeros(len(routed), 128, dtype=torch.float64)
            d_router, size = torch.zeros(2, len(routed), dtype=torch.float64)
            for cell in routed.nonzero().squeeze(1).tolist():
                owner, row = int(table.route_rank[cell]), int(table.route_row[cell])
                cells[cell] = d_xs[owner][row].double()
                d_router[cell] = partials[owner][row].double().sum()
                size[cell] = partials[owner][row].double().abs().sum()
            exact += [cells, d_router]
            used += [routed, routed]
            slack += [None, size * num_groups * 2.0**-24]
        options: dict[str, Any] = {
            "dtypes": [torch.bfloat16, torch.float32] * len(tables),
            "rules": ["values", "rounding"] * len(tables),
        }
        scale = [each.abs() if own is None else own * 2.0**20 for each, own in zip(exact, slack, strict=True)]
        yield Case(name, (d_xs, partials, tables), {}, exact, used, slack, scale, **options)


# ---- the products ----


@CASES.add("grouped_dgrad")
def _grouped_dgrad_cases() -> Iterator[Case]:
    for i, (name, counts) in enumerate(SEGMENTS.items()):
        for num_products in (1, 2):
            for num_behind in (0, 64):
                start, rows_of = segments(counts)
                num_rows = int(start[-1]) + num_behind
                width, num_cols = 192, 128
                used = filled(start, rows_of, num_rows)
                rows = [random(num_rows, width, seed=10 * i + p) for p in range(num_products)]
                for each in rows:
                    each[~used] = math.nan
                weights = [random(len(counts), width, num_cols, seed=100 + p) for p in range(num_products)]
                expert = torch.repeat_interleave(torch.arange(len(counts)), start.diff().long())
                expert = torch.cat([expert, torch.zeros(num_behind, dtype=torch.long)])
                exact, size = torch.zeros(2, num_rows, num_cols, dtype=torch.float64)
                for each, weight in zip(rows, weights, strict=True):
                    clean, own = each.where(used[:, None], 0).double(), weight.double()[expert]
                    exact = exact + torch.einsum("rk,rkn->rn", clean, own)
                    size = size + torch.einsum("rk,rkn->rn", clean.abs(), own.abs())
                pair = num_products == 2
                yield Case(
                    f"{name}, {'gate and up' if pair else 'down'}, {num_behind} rows behind",
                    (tuple(rows), tuple(weights), start, rows_of) if pair else (rows[0], weights[0], start, rows_of),
                    {},
                    [exact],
                    [used],
                    [size * 2.0**-21],
                    [size],
                    rule="rounding",
                    is_padding_checked=True,
                )


@CASES.add("wgrad")
def _wgrad_cases() -> Iterator[Case]:
    for i, (name, counts) in enumerate(SEGMENTS.items()):
        for num_behind in (0, 64):
            yield _wgrad_case(f"{name}, {num_behind} rows behind", counts, num_behind, None, seed=10 * i)
    yield _wgrad_case("a carry of the first expert", [300, 0, 3], 0, 0, seed=60)
    yield _wgrad_case("a carry behind an empty expert", [0, 7, 130], 64, 1, seed=70)


def _wgrad_case(name: str, counts: list[int], num_behind: int, carried: int | None, seed: int) -> Case:
    start, rows_of = segments(counts)
    num_rows, shape = int(start[-1]) + num_behind, (len(counts), 192, 128)
    used = filled(start, rows_of, num_rows)
    left, right = random(num_rows, shape[1], seed=seed), random(num_rows, shape[2], seed=seed + 1)
    left[~used], right[~used] = math.nan, math.nan
    exact, size = torch.zeros(2, *shape, dtype=torch.float64)
    carry = None
    if carried is not None:
        carry = torch.zeros(shape)
        carry[carried] = 30 * random(*shape[1:], seed=seed + 2).float()
        exact, size = carry.double(), carry.double().abs()
    for expert, (first, count) in enumerate(zip(start.tolist(), counts, strict=False)):
        a, b = left[first : first + count].double(), right[first : first + count].double()
        exact[expert] += a.T @ b
        size[expert] += a.abs().T @ b.abs()
    has_rows = rows_of > 0
    return Case(
        name,
        (left, right, start, rows_of, carry),
        {},
        [exact],
        [has_rows],
        [size * 2.0**-20],
        [size] if carried is None else None,
        rule="rounding" if carried is None else "carry",
        dtypes=[torch.float32],
        empty=[~has_rows],
    )


# ---- swiglu_backward ----


@CASES.add("swiglu_backward")
def _swiglu_backward_cases() -> Iterator[Case]:
    d_hidden, gate, up = random(256, 192, seed=1), 3 * random(256, 192, seed=2), random(256, 192, seed=3)
    one = torch.ones(256)
    for num_rows in (256, 131, 1, 0):
        yield _swiglu_backward_case(f"{num_rows} of 256 rows", (d_hidden, gate, up, one), None, num_rows, "values")
    weights = random(256, 1, seed=4).float()[:, 0] / 3
    weights[:4] = torch.tensor([0.0, -1.5, 1e-20, -1e-20])
    given = tuple(tensor.clone() for tensor in (d_hidden, gate, up, weights))
    for tensor in given:
        tensor[40:50] = 0  # as padding between two segments is
    yield _swiglu_backward_case("weights of all kinds", given, None, 200, "router weight")
    for limit in (0.0, 0.5, 1.0, 7.0):
        at = tuple(tensor.clone() for tensor in (d_hidden, gate, up, one))
        at[1][:, 0], at[2][:, 1], at[2][:, 2] = limit, limit, -limit
        yield _swiglu_backward_case(f"limit {limit}", at, limit, 200, "limit")
    edge = torch.tensor([0.0, -0.0, 0.5, -0.5, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38, 1e-38, 1.0] * 16).bfloat16()
    gates = edge.expand(12, -1).contiguous()
    ups = torch.stack([edge.roll(shift) for shift in range(12)]).clamp(-1, 1)
    small = random(12, 192, seed=5) * 2.0**-10
    yield _swiglu_backward_case("large, small and zero gates", (small, gates, ups, one[:12]), None, 12, "range")


def _swiglu_backward_case(
    name: str, given: tuple[Tensor, ...], limit: float | None, num_rows: int, large_rule: str
) -> Case:
    args = tuple(tensor.clone() for tensor in given)
    used = torch.arange(len(args[0])) < num_rows
    for tensor in args:
        tensor[~used] = math.nan
    d_h, g, u, w = (tensor.double() for tensor in args)
    w = w[:, None]
    gate_passes, up_passes = torch.ones_like(g), torch.ones_like(u)
    if limit is not None:
        gate_passes, up_passes = (g <= limit).double(), ((u <= limit) & (u >= -limit)).double()
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    s = g.sigmoid()
    silu = g * s
    # h as the forward rounded it. Where float32 cannot tell which way that was, either is right: `doubt`.
    whole = silu * u
    h = whole.bfloat16().double()
    near = whole.abs() * 2.0**-17
    doubt = ((whole + near).bfloat16().double() - (whole - near).bfloat16().double()).abs()
    scale_gate, scale_up = (d_h * w * u).abs() * s * (1 + g.abs() * (1 - s)), (d_h * w * silu).abs()
    terms, router_doubt = (_group_sums(t) for t in ((d_h * h).abs(), d_h.abs() * doubt))
    tiny = 2.0**-133  # near the end of its range float32 is coarser
    slack = [scale_gate * 2.0**-17 + tiny, scale_up * 2.0**-17 + tiny]
    slack += [(w * h).abs() * 2.0**-20 + w.abs() * doubt + tiny, terms * 2.0**-20 + router_doubt + tiny]
    exact = [
        d_h * w * u * s * (1 + g * (1 - s)) * gate_passes,
        d_h * w * silu * up_passes,
        w * h,
        _group_sums(d_h * h),
    ]
    scale = [2 * scale_gate + 2.0**-100, 2 * scale_up + 2.0**-100, (w * h).abs() + 2.0**-100, terms + 2.0**-100]
    return Case(
        name,
        (*args, limit),
        {"num_rows": count_of(num_rows)},
        exact,
        [used] * 4,
        [each.nan_to_num() for each in slack],
        scale,
        "rounding",
        large_rule,
        dtypes=[torch.bfloat16] * 3 + [torch.float32],
    )


def _group_sums(values: Tensor) -> Tensor:
    return values.unflatten(1, (-1, _COLUMNS)).sum(2)


# ---- order: the same row elsewhere ----


@ORDER.add("grouped_dgrad")
def _grouped_dgrad_order(f: Callable[..., Any]) -> Iterator[Finding]:
    rows, weight = random(128, 192, seed=5), random(1, 192, 128, seed=6)
    start, counts = segments([128])
    whole = f(rows, weight, start, counts)
    yield compare("rows in reverse", whole, f(rows.flip(0), weight, start, counts).flip(0))
    few = torch.tensor([3], dtype=torch.int32)
    yield compare("the first rows alone", whole[:3], f(rows, weight, start, few)[:3])
    start, counts = segments([130, 128])
    both = torch.cat([random(256, 192, seed=7), rows])
    weights = torch.cat([random(1, 192, 128, seed=8), weight])
    yield compare("behind another expert", whole, f(both, weights, start, counts)[256:])


@ORDER.add("swiglu_backward")
def _swiglu_backward_order(f: Callable[..., Any]) -> Iterator[Finding]:
    given = (random(256, 192, seed=3), 3 * random(256, 192, seed=4), random(256, 192, seed=5))
    weights = random(256, 1, seed=6).float()[:, 0]
    whole = f(*given, weights, None, num_rows=count_of(256))
    turned = f(*(tensor.flip(0) for tensor in given), weights.flip(0), None, num_rows=count_of(256))
    first = f(*(tensor[:7].clone() for tensor in given), weights[:7].clone(), None, num_rows=count_of(7))
    for one, other, few in zip(whole, turned, first, strict=True):
        yield compare("rows in reverse", one, other.flip(0))
        yield compare("the first rows alone", one[:7], few)


@ORDER.add("wgrad")
def _wgrad_order(f: Callable[..., Any]) -> Iterator[Finding]:
    left, right = random(128, 192, seed=5), random(128, 128, seed=6)
    start, counts = segments([70])
    whole = f(left, right, start, counts, None)[0]
    start, counts = segments([130, 70])
    before = [torch.cat([random(256, each.shape[1], seed=7), each]) for each in (left, right)]
    yield compare("behind another expert", whole, f(*before, start, counts, None)[1])
    left[70:], right[70:] = 5, 5
    start, counts = segments([70])
    yield compare("with other padding", whole, f(left, right, start, counts, None)[0])
