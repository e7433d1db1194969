"""The cases of the contracts of a forward's stages, and that the place of a row does not matter."""

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

CASES: Registry[Callable[[], Iterator[Case]]] = Registry()
"""What a stage is called with, and what it must give."""

ORDER: Registry[Callable[[Callable[..., Any]], Iterator[Finding]]] = Registry()
"""Calls that must give the same bits, where rows stand in another order; none for stages that only move rows."""


@CASES.add("grouped_gemm")
def _gemm_cases() -> Iterator[Case]:
    for i, (name, counts) in enumerate(SEGMENTS.items()):
        for num_weights in (1, 2):
            for num_behind in (0, 64):
                start, rows_of = segments(counts)
                num_rows = int(start[-1]) + num_behind
                width, num_cols = 192, 128
                rows = random(num_rows, width, seed=i)
                used = filled(start, rows_of, num_rows)
                rows[~used] = math.nan
                weights = [random(len(counts), num_cols, width, seed=100 + w) for w in range(num_weights)]
                expert = torch.repeat_interleave(torch.arange(len(counts)), start.diff().long())
                expert = torch.cat([expert, torch.zeros(num_behind, dtype=torch.long)])
                clean = rows.where(used[:, None], 0).double()
                exact = [torch.einsum("rk,rnk->rn", clean, w.double()[expert]) for w in weights]
                size = [torch.einsum("rk,rnk->rn", clean.abs(), w.double().abs()[expert]) for w in weights]
                yield Case(
                    f"{name}, {num_weights} weight{'s' if num_weights > 1 else ''}, {num_behind} rows behind",
                    (rows, weights[0] if num_weights == 1 else tuple(weights), start, rows_of),
                    {},
                    exact,
                    [used] * num_weights,
                    [each * 2.0**-21 for each in size],
                    size,
                    rule="rounding",
                    is_padding_checked=True,
                )


def _swiglu_exact(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate * gate.sigmoid() * up


def _swiglu_case(name: str, gate: Tensor, up: Tensor, limit: float | None, num_rows: int, rule: str) -> Case:
    used = torch.arange(len(gate)) < num_rows
    gate, up = gate.clone(), up.clone()
    gate[~used], up[~used] = math.nan, math.nan
    exact = _swiglu_exact(gate, up, limit)
    # float32's own: of the exponential, the quotient and two products; near the end of its range it is coarser.
    slack = exact.abs() * 2.0**-17 + 2.0**-133
    scale = [exact.abs() * 2 + 2.0**-100] if rule == "rounding" else None
    return Case(
        name, (gate, up, limit), {"num_rows": count_of(num_rows)}, [exact], [used], [slack.nan_to_num()], scale, rule
    )


@CASES.add("swiglu")
def _swiglu_cases() -> Iterator[Case]:
    gate, up = 3 * random(256, 192, seed=1), random(256, 192, seed=2)
    for num_rows in (256, 131, 1, 0):
        yield _swiglu_case(f"{num_rows} of 256 rows", gate, up, None, num_rows, "rounding")
    for limit in (0.0, 0.5, 1.0, 7.0):
        yield _swiglu_case(f"limit {limit}", gate, up, limit, 200, "limit")
    edge = torch.tensor([0.0, -0.0, 0.5, -0.5, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38, 1e-38, math.nan] * 16).bfloat16()
    edge = edge.view(1, 192)
    finite = edge.nan_to_num(1.0).expand(12, -1).contiguous()
    other = torch.stack([finite[0].roll(shift) for shift in range(12)]).clamp(-1, 1)
    yield _swiglu_case("large, small and zero gates", finite, other, None, 12, "range")
    yield _swiglu_case("NaN under a limit", edge.expand(3, -1).contiguous(), edge.abs().expand(3, -1), 1.0, 3, "limit")


@CASES.add("reduce")
def _reduce_cases() -> Iterator[Case]:
    for i, (name, num_tokens, topk, has_shared) in enumerate(
        [
            ("shared expert", 37, 4, True),
            ("no shared expert", 37, 4, False),
            ("one route", 9, 1, True),
            ("many routes", 5, 22, True),
            ("no tokens", 0, 4, True),
        ]
    ):
        generator = torch.Generator().manual_seed(i)
        combined, width = random(num_tokens * topk, 128, seed=i), 128
        weights = torch.randn(num_tokens, topk, generator=generator)
        mask = torch.rand(num_tokens, topk, generator=generator) < 0.8
        mask[::5] = False  # tokens without any route
        combined[~mask.view(-1)] = math.nan
        weights[~mask] = math.nan
        shared = random(num_tokens, width, seed=50 + i) if has_shared else None
        rows = combined.view(num_tokens, topk, width).double().where(mask[:, :, None], 0)
        scale = weights.double().where(mask, 0)[:, :, None]
        base = shared.double() if shared is not None else torch.zeros(num_tokens, width, dtype=torch.float64)
        exact = base + (rows * scale).sum(1)
        size = base.abs() + (rows * scale).abs().sum(1)
        used = torch.ones(num_tokens, dtype=torch.bool)
        slack = [size * topk * 2.0**-24]
        yield Case(name, (combined, weights, mask, shared), {}, [exact], [used], slack, [size], rule="rounding")


@CASES.add("dispatch")
def _dispatch_cases() -> Iterator[Case]:
    for i, (name, tokens, topk, tables) in enumerate(route_cases()):
        xs = [random(count, 128, seed=10 * i + rank) for rank, count in enumerate(tokens)]
        exact, used = [], []
        for table in tables:
            num_rows = int(table.segment_start[-1])
            is_row = table.peer_rank[:num_rows] >= 0
            rows = torch.zeros(num_rows, 128, dtype=torch.float64)
            for row in is_row.nonzero().squeeze(1).tolist():
                rows[row] = xs[int(table.peer_rank[row])][int(table.peer_token_idx[row]) // topk].double()
            exact.append(rows)
            used.append(is_row)
        yield Case(name, (xs, tables), {"topk": topk}, exact, used, is_padding_checked=True)


@CASES.add("combine")
def _combine_cases() -> Iterator[Case]:
    for i, (name, _, _, tables) in enumerate(route_cases()):
        ys = []
        for rank, table in enumerate(tables):
            num_rows = int(table.segment_start[-1])
            y = random(num_rows, 128, seed=10 * i + rank)
            y[table.peer_rank[:num_rows] < 0] = math.nan
            ys.append(y)
        exact, used = [], []
        for table in tables:
            routed = table.route_rank >= 0
            cells = torch.zeros(len(routed), 128, dtype=torch.float64)
            for cell in routed.nonzero().squeeze(1).tolist():
                cells[cell] = ys[int(table.route_rank[cell])][int(table.route_row[cell])].double()
            exact.append(cells)
            used.append(routed)
        yield Case(name, (ys, tables), {}, exact, used)


# ---- order: the same row elsewhere ----


@ORDER.add("swiglu")
def _swiglu_order(f: Callable[..., Any]) -> Iterator[Finding]:
    gate, up = 3 * random(256, 192, seed=3), random(256, 192, seed=4)
    whole = f(gate, up, None, num_rows=count_of(256))
    turned = f(gate.flip(0), up.flip(0), None, num_rows=count_of(256)).flip(0)
    yield compare("rows in reverse", whole, turned)
    yield compare("the first rows alone", whole[:7], f(gate[:7].clone(), up[:7].clone(), None, num_rows=count_of(7)))


@ORDER.add("grouped_gemm")
def _gemm_order(f: Callable[..., Any]) -> Iterator[Finding]:
    rows, weight = random(128, 192, seed=5), random(1, 128, 192, seed=6)
    start, _ = segments([128])
    whole = f(rows, weight, start, torch.tensor([128], dtype=torch.int32))
    turned = f(rows.flip(0), weight, start, torch.tensor([128], dtype=torch.int32)).flip(0)
    yield compare("rows in reverse", whole, turned)
    yield compare("the first rows alone", whole[:3], f(rows, weight, start, torch.tensor([3], dtype=torch.int32))[:3])
    start, counts = segments([130, 128])
    both = torch.cat([random(256, 192, seed=7), rows])
    out = f(both, torch.cat([random(1, 128, 192, seed=8), weight]), start, counts)
    yield compare("behind another expert", whole, out[256:])


@ORDER.add("reduce")
def _reduce_order(f: Callable[..., Any]) -> Iterator[Finding]:
    combined, shared = random(40 * 3, 128, seed=9), random(40, 128, seed=10)
    weights, mask = torch.rand(40, 3, generator=torch.Generator().manual_seed(11)), torch.ones(40, 3, dtype=torch.bool)
    whole = f(combined, weights, mask, shared)
    flipped = f(combined.view(40, 3, 128).flip(0).reshape(120, 128), weights.flip(0), mask, shared.flip(0)).flip(0)
    yield compare("tokens in reverse", whole, flipped)
