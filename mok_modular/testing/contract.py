"""The contract of a stage, as a suite that anybody's function can be held against.

    report = mok.testing.check_stage("swiglu", my_swiglu)
    print(report)                  # every rule, and what was seen where one is broken
    assert report.is_ok

`f` has the signature of `mok_modular.stages.<name>.reference` (see mok_modular.swap for what it is given in a layer).
The references and the compiled stages (`launch`) keep every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_modular.errors import format_table
from mok_modular.swap import STAGES_OF

RULES = {
    "runs": "takes the arguments of the reference and returns without an exception",
    "shape": "returns what the reference returns: as many tensors, shapes, bfloat16",
    "inputs unchanged": "writes none of its arguments",
    "values": "rows are right in every case: empty, partial, full and hot segments, one row, no rows",
    "padding": "padding rows come out as zeros",
    "unread": "what must not be read (padding, rows behind the last, missing routes) may be NaN",
    "rounding": "sums and products in float32, rounded to bfloat16 once, at the end",
    "order": "a row does not depend on the rows beside it, nor on their order",
    "repeatable": "the same arguments give the same bits",
    "limit": "gate is clamped above, up on both sides, 0.0 is a limit, NaN stays NaN",
    "range": "no finite argument gives NaN",
}
"""What each rule means."""

_ROW_BLOCK = 128
_HALF_ULP = 0.5 + 2.0**-5
"""Rounding once from float32: half a unit in the last place of bfloat16, and what float32 itself may add."""


@dataclass(frozen=True)
class Finding:
    """A rule in one case: whether it was kept, and what was seen if not."""

    rule: str
    case: str
    is_ok: bool
    detail: str = ""


@dataclass
class ContractReport:
    """What check_stage found: `findings` in order, `is_ok`, and `broken`, the rules that were broken."""

    stage: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> list[str]:
        found = [finding.rule for finding in self.findings if not finding.is_ok]
        return [rule for rule in RULES if rule in found]

    def __str__(self) -> str:
        lines = []
        for rule in dict.fromkeys(finding.rule for finding in self.findings):
            mine = [finding for finding in self.findings if finding.rule == rule]
            bad = [finding for finding in mine if not finding.is_ok]
            seen = f"{bad[0].case}: {bad[0].detail}" if bad else f"{len(mine)} cases"
            lines.append((rule, "BROKEN" if bad else "ok", RULES[rule], seen))
        return f"{self.stage}\n" + format_table(("rule", "verdict", "meaning", "seen"), lines)


@dataclass(frozen=True, eq=False)
class _Case:
    """Arguments of one call, the exact result by tensor, and which of its rows count.

    `slack` [rows, columns] is what float32 sums may add to half a unit in the last place; None: bits must agree.
    `scale` is the sum of absolute values that a sum is made of: an error that is small beside it comes from rounding.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: list[Tensor]
    used: list[Tensor]
    slack: list[Tensor] | None = None
    scale: list[Tensor] | None = None
    rule: str = "values"
    is_padding_checked: bool = False


def check_stage(name: str, f: Callable[..., Any]) -> ContractReport:
    """Holds `f` against the contract of a stage: dispatch, grouped_gemm, swiglu, combine or reduce.

    Raises ValueError for another name, TypeError if `f` cannot be called. What `f` raises is a finding.
    """
    if name not in STAGES_OF:
        raise ValueError(f"stages with a contract are {', '.join(STAGES_OF)}; got {name!r}")
    if not callable(f):
        raise TypeError(f"f must be a function, got {type(f).__name__}")
    report = ContractReport(name)
    with torch.no_grad():
        for case in _CASES[name]():
            _check_case(report, f, case)
        if report.is_ok:
            for finding in _ORDER[name](f):
                report.findings.append(finding)
    return report


def _check_case(report: ContractReport, f: Callable[..., Any], case: _Case) -> None:
    def say(rule: str, is_ok: bool, detail: str = "") -> bool:
        report.findings.append(Finding(rule, case.name, is_ok, "" if is_ok else detail))
        return is_ok

    before = [t.clone() for t in _tensors(case.args)]
    try:
        results = _as_list(f(*case.args, **case.kwargs))
        again = _as_list(f(*case.args, **case.kwargs))
    except Exception as error:
        say("runs", False, f"{type(error).__name__}: {error}")
        return
    say("runs", True)
    shapes = [tuple(t.shape) for t in case.exact]
    given = [(tuple(r.shape), r.dtype) if isinstance(r, Tensor) else type(r).__name__ for r in results]
    if not say("shape", given == [(shape, torch.bfloat16) for shape in shapes], f"got {given}, wants {shapes}"):
        return
    is_same = all(_same_bits(a, b) for a, b in zip(before, _tensors(case.args), strict=True))
    say("inputs unchanged", is_same, "an argument was written")
    for i, (result, exact, used) in enumerate(zip(results, case.exact, case.used, strict=True)):
        say("repeatable", _same_bits(result[used], again[i][used]), "two calls, different bits")
        if case.is_padding_checked:
            is_zero = not bool(result[~used].ne(0).any())
            say("padding", is_zero, f"row {_first(result[~used].ne(0).any(1))} of the unused ones is not zero")
        wrong = _wrong(result[used], exact[used], None if case.slack is None else case.slack[i][used])
        rule = case.rule
        if wrong and case.scale is not None:
            distance = (result[used].double() - exact[used]).abs()
            if not bool((distance <= case.scale[i][used] * 2.0**-5).all()):
                rule = "values"
        say(rule, not wrong, wrong)


def _wrong(result: Tensor, exact: Tensor, slack: Tensor | None) -> str:
    """What is wrong first, and by how many units in the last place; empty: nothing."""
    if slack is None:
        if _same_bits(result, exact.bfloat16()):
            return ""
        row = _first((result.view(torch.int16) != exact.bfloat16().view(torch.int16)).any(1))
        return f"row {row} has other bits"
    is_nan = exact.isnan()
    bad = result.isnan() != is_nan
    ulp = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    error = ((result.double() - exact).abs() - slack) / ulp
    error = error.masked_fill(is_nan | (result.double() == exact), 0)
    is_bad = bad | (error > _HALF_ULP)
    if not bool(is_bad.any()):
        return ""
    row = _first(is_bad.any(1))
    column = _first(is_bad[row])
    worst = math.inf if bool(bad.any()) else float(error.max())
    return (
        f"row {row}, column {column}: got {float(result[row, column]):.6g}, exactly {float(exact[row, column]):.6g}; "
        f"worst error {worst:.3g} units in the last place, {_HALF_ULP:.3g} allowed"
    )


# ---- cases ----


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _segments(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(counts, dtype=torch.int32)
    padded = (rows + _ROW_BLOCK - 1) // _ROW_BLOCK * _ROW_BLOCK
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0)).int(), rows


def _filled(start: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    used = torch.zeros(num_rows, dtype=torch.bool)
    for first, count in zip(start.tolist(), counts.tolist(), strict=False):
        used[first : first + count] = True
    return used


SEGMENTS = {
    "one row": [1],
    "empty segments": [0, 5, 0],
    "hot segment": [0, 300, 3],
    "full segments": [128, 256],
    "no rows": [0, 0],
}


def _gemm_cases() -> Iterator[_Case]:
    for i, (name, counts) in enumerate(SEGMENTS.items()):
        for num_weights in (1, 2):
            for num_behind in (0, 64):
                start, rows_of = _segments(counts)
                num_rows = int(start[-1]) + num_behind
                width, num_cols = 192, 128
                rows = _random(num_rows, width, seed=i)
                used = _filled(start, rows_of, num_rows)
                rows[~used] = math.nan
                weights = [_random(len(counts), num_cols, width, seed=100 + w) for w in range(num_weights)]
                expert = torch.repeat_interleave(torch.arange(len(counts)), start.diff().long())
                expert = torch.cat([expert, torch.zeros(num_behind, dtype=torch.long)])
                clean = rows.where(used[:, None], 0).double()
                exact = [torch.einsum("rk,rnk->rn", clean, w.double()[expert]) for w in weights]
                size = [torch.einsum("rk,rnk->rn", clean.abs(), w.double().abs()[expert]) for w in weights]
                yield _Case(
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


def _swiglu_case(name: str, gate: Tensor, up: Tensor, limit: float | None, num_rows: int, rule: str) -> _Case:
    used = torch.arange(len(gate)) < num_rows
    gate, up = gate.clone(), up.clone()
    gate[~used], up[~used] = math.nan, math.nan
    exact = _swiglu_exact(gate, up, limit)
    # float32's own: of the exponential, the quotient and two products; near the end of its range it is coarser.
    slack = exact.abs() * 2.0**-17 + 2.0**-133
    count = torch.tensor(num_rows, dtype=torch.int32)
    scale = [exact.abs() * 2 + 2.0**-100] if rule == "rounding" else None
    return _Case(name, (gate, up, limit), {"num_rows": count}, [exact], [used], [slack.nan_to_num()], scale, rule)


def _swiglu_cases() -> Iterator[_Case]:
    gate, up = 3 * _random(256, 192, seed=1), _random(256, 192, seed=2)
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


def _reduce_cases() -> Iterator[_Case]:
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
        combined, width = _random(num_tokens * topk, 128, seed=i), 128
        weights = torch.randn(num_tokens, topk, generator=generator)
        mask = torch.rand(num_tokens, topk, generator=generator) < 0.8
        mask[::5] = False  # tokens without any route
        combined[~mask.view(-1)] = math.nan
        weights[~mask] = math.nan
        shared = _random(num_tokens, width, seed=50 + i) if has_shared else None
        rows = combined.view(num_tokens, topk, width).double().where(mask[:, :, None], 0)
        scale = weights.double().where(mask, 0)[:, :, None]
        base = shared.double() if shared is not None else torch.zeros(num_tokens, width, dtype=torch.float64)
        exact = base + (rows * scale).sum(1)
        size = base.abs() + (rows * scale).abs().sum(1)
        used = torch.ones(num_tokens, dtype=torch.bool)
        slack = [size * topk * 2.0**-24]
        yield _Case(name, (combined, weights, mask, shared), {}, [exact], [used], slack, [size], rule="rounding")


def _route_cases() -> Iterator[tuple[str, list[int], int, list[Any]]]:
    from mok_modular.stages import schedule

    def ids(kind: str, count: int, topk: int, num_experts: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        out = torch.randint(-1, num_experts, (count, topk), generator=generator)
        if kind == "hot segment":
            out.fill_(1)
        if kind == "no rows":
            out.fill_(-1)
        return out.int()

    for kind, tokens, topk in (
        ("random routes", [70, 33], 3),
        ("hot segment", [90, 61], 2),
        ("a rank without tokens", [0, 50], 2),
        ("no rows", [4, 3], 2),
    ):
        rank_ids = [ids(kind, count, topk, 4, seed) for seed, count in enumerate(tokens)]
        yield kind, tokens, topk, list(schedule.reference(rank_ids, num_experts=4, row_block=_ROW_BLOCK))


def _dispatch_cases() -> Iterator[_Case]:
    for i, (name, tokens, topk, tables) in enumerate(_route_cases()):
        xs = [_random(count, 128, seed=10 * i + rank) for rank, count in enumerate(tokens)]
        exact, used = [], []
        for table in tables:
            num_rows = int(table.segment_start[-1])
            is_row = table.peer_rank[:num_rows] >= 0
            rows = torch.zeros(num_rows, 128, dtype=torch.float64)
            for row in is_row.nonzero().squeeze(1).tolist():
                rows[row] = xs[int(table.peer_rank[row])][int(table.peer_token_idx[row]) // topk].double()
            exact.append(rows)
            used.append(is_row)
        yield _Case(name, (xs, tables), {"topk": topk}, exact, used, is_padding_checked=True)


def _combine_cases() -> Iterator[_Case]:
    for i, (name, _, _, tables) in enumerate(_route_cases()):
        ys = []
        for rank, table in enumerate(tables):
            num_rows = int(table.segment_start[-1])
            y = _random(num_rows, 128, seed=10 * i + rank)
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
        yield _Case(name, (ys, tables), {}, exact, used)


# ---- order: the same row elsewhere ----


def _compare(case: str, a: Tensor, b: Tensor) -> Finding:
    is_same = _same_bits(a, b)
    return Finding("order", case, is_same, "" if is_same else "the same row has other bits in another place")


def _swiglu_order(f: Callable[..., Any]) -> Iterator[Finding]:
    gate, up = 3 * _random(256, 192, seed=3), _random(256, 192, seed=4)
    whole = f(gate, up, None)
    turned = f(gate.flip(0), up.flip(0), None).flip(0)
    yield _compare("rows in reverse", whole, turned)
    yield _compare("the first rows alone", whole[:7], f(gate[:7].clone(), up[:7].clone(), None))


def _gemm_order(f: Callable[..., Any]) -> Iterator[Finding]:
    rows, weight = _random(128, 192, seed=5), _random(1, 128, 192, seed=6)
    start, _ = _segments([128])
    whole = f(rows, weight, start, torch.tensor([128], dtype=torch.int32))
    turned = f(rows.flip(0), weight, start, torch.tensor([128], dtype=torch.int32)).flip(0)
    yield _compare("rows in reverse", whole, turned)
    yield _compare("the first rows alone", whole[:3], f(rows, weight, start, torch.tensor([3], dtype=torch.int32))[:3])
    start, counts = _segments([130, 128])
    both = torch.cat([_random(256, 192, seed=7), rows])
    out = f(both, torch.cat([_random(1, 128, 192, seed=8), weight]), start, counts)
    yield _compare("behind another expert", whole, out[256:])


def _reduce_order(f: Callable[..., Any]) -> Iterator[Finding]:
    combined, shared = _random(40 * 3, 128, seed=9), _random(40, 128, seed=10)
    weights, mask = torch.rand(40, 3, generator=torch.Generator().manual_seed(11)), torch.ones(40, 3, dtype=torch.bool)
    whole = f(combined, weights, mask, shared)
    flipped = f(combined.view(40, 3, 128).flip(0).reshape(120, 128), weights.flip(0), mask, shared.flip(0)).flip(0)
    yield _compare("tokens in reverse", whole, flipped)


def _no_order(_: Callable[..., Any]) -> Iterator[Finding]:
    """Copies: that bits agree says it all."""
    return iter(())


_CASES: dict[str, Callable[[], Iterator[_Case]]] = {
    "dispatch": _dispatch_cases,
    "grouped_gemm": _gemm_cases,
    "swiglu": _swiglu_cases,
    "combine": _combine_cases,
    "reduce": _reduce_cases,
}
_ORDER: dict[str, Callable[[Callable[..., Any]], Iterator[Finding]]] = {
    "dispatch": _no_order,
    "grouped_gemm": _gemm_order,
    "swiglu": _swiglu_order,
    "combine": _no_order,
    "reduce": _reduce_order,
}


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [t for t in vars(values).values() if isinstance(t, Tensor)] if hasattr(values, "__dict__") else []


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _first(mask: Tensor) -> int:
    found = mask.nonzero()
    return int(found[0]) if len(found) else -1
