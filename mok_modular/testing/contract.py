"""The contract of a stage, as a suite that anybody's function can be held against.

    report = mok.testing.check_stage("swiglu", my_swiglu)
    print(report)                  # every rule, and what was seen where one is broken
    assert report.is_ok

`f` has the signature of `mok_modular.stages.<name>.reference` (see mok_modular.swap for what it is given in a layer).
The references and the compiled stages (`launch`) keep every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.errors import format_table
from mok_modular.protocol.swap_rules import SIGNATURES
from mok_modular.testing import contract_backward, contract_forward
from mok_modular.testing.contract_case import Case, Finding, no_order, same_bits

RULES = {
    "runs": "takes the arguments of the reference and returns without an exception",
    "shape": "returns what the reference returns: as many tensors, shapes, dtypes",
    "inputs unchanged": "writes none of its arguments",
    "values": "rows are right in every case: empty, partial, full and hot segments, one row, no rows",
    "empty": "an expert without rows gives exact zeros, or its carry",
    "padding": "padding rows come out as zeros",
    "unread": "what must not be read (padding, rows behind the last, missing routes) may be NaN",
    "rounding": "sums and products in float32, rounded once, at the end, to the dtype that is returned",
    "router weight": "it scales d_gate, d_up and w * h, and not d_router; zero and negative weights are weights",
    "carry": "sums go on from the carry, so that rows may come in several windows",
    "order": "a row does not depend on the rows beside it, nor on their order; an expert not on the others",
    "repeatable": "the same arguments give the same bits",
    "limit": "gate is clamped above, up on both sides, 0.0 is a limit, NaN stays NaN; gradients pass at it, not beyond",
    "range": "no finite argument gives NaN",
}
"""What each rule means."""

_UNPOISONED = (
    "values",
    "rounding",
    "carry",
    "router weight",
)  # a NaN that breaks one of these came from what is unread
_CASES = {**contract_forward.CASES, **contract_backward.CASES}
_ORDER = {**contract_forward.ORDER, **contract_backward.ORDER}
_HALF_ULP = 0.5 + 2.0**-5
"""Rounding once from float32: half a unit in the last place, and what float32 itself may add."""


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


def check_stage(name: str, f: Callable[..., Any]) -> ContractReport:
    """Holds `f` against the contract of a stage: any that `MoKConfig(stages=...)` takes.

    Raises ValueError for another name, TypeError if `f` cannot be called. What `f` raises is a finding.
    """
    if name not in SIGNATURES:
        raise ValueError(f"stages with a contract are {', '.join(SIGNATURES)}; got {name!r}")
    if not callable(f):
        raise TypeError(f"f must be a function, got {type(f).__name__}")
    report = ContractReport(name)
    with torch.no_grad():
        for case in _CASES[name]():
            _check_case(report, f, case)
        if report.is_ok:
            try:
                report.findings.extend(_ORDER.get(name, no_order)(f))
            except Exception as error:
                report.findings.append(Finding("runs", "order", False, f"{type(error).__name__}: {error}"))
    return report


def _check_case(report: ContractReport, f: Callable[..., Any], case: Case) -> None:
    def say(rule: str, is_ok: bool, detail: str = "") -> bool:
        report.findings.append(Finding(rule, case.name, is_ok, "" if is_ok else detail))
        return is_ok

    before = [t.clone() for t in _tensors(case.args)]
    is_poisoned = any(t.is_floating_point() and bool(t.isnan().any()) for t in before)
    try:
        results = _as_list(f(*case.args, **case.kwargs))
        again = _as_list(f(*case.args, **case.kwargs))
    except Exception as error:
        say("runs", False, f"{type(error).__name__}: {error}")
        return
    say("runs", True)
    wanted = [(tuple(t.shape), case.dtype(i)) for i, t in enumerate(case.exact)]
    given = [(tuple(r.shape), r.dtype) if isinstance(r, Tensor) else type(r).__name__ for r in results]
    if not say("shape", given == wanted, f"got {_words(given)}; wants {_words(wanted)}"):
        return
    is_same = all(same_bits(a, b) for a, b in zip(before, _tensors(case.args), strict=True))
    say("inputs unchanged", is_same, "an argument was written")
    for i, (result, exact, used) in enumerate(zip(results, case.exact, case.used, strict=True)):
        say("repeatable", same_bits(result[used], again[i][used]), "two calls, different bits")
        if case.is_padding_checked:
            padding = _matrix(result[~used]).ne(0)
            say("padding", not bool(padding.any()), f"row {_first(padding.any(1))} of the unused ones is not zero")
        if case.empty:
            _check_empty(say, result, exact, case.empty[i])
        slack = case.slack[i] if case.slack else None
        wrong = _wrong(result[used], exact[used], None if slack is None else slack[used])
        rule = case.rules[i] if case.rules else case.rule
        if wrong and case.scale is not None:
            distance = (result[used].double() - exact[used]).abs()
            if not bool((distance <= case.scale[i][used] * 2.0**-5).all()):
                rule = case.large_rule
        if wrong and rule in _UNPOISONED and is_poisoned and bool((result[used].isnan() & ~exact[used].isnan()).any()):
            rule = "unread"
        say(rule, not wrong, wrong)


def _check_empty(say: Callable[..., bool], result: Tensor, exact: Tensor, empty: Tensor) -> None:
    for expert in empty.nonzero().flatten().tolist():
        is_exact = same_bits(result[expert], exact[expert].to(result.dtype))
        say("empty", is_exact, f"expert {expert} has no rows, and other bits than it had before")


def _wrong(result: Tensor, exact: Tensor, slack: Tensor | None) -> str:
    """What is wrong first, and by how many units in the last place; empty: nothing."""
    shape = result.shape
    result, exact = _matrix(result), _matrix(exact)
    if slack is None:
        wanted = exact.to(result.dtype)
        if same_bits(result, wanted):
            return ""
        other = result.view(torch.uint8) != wanted.view(torch.uint8)
        return f"row {_first(other.any(1))} has other bits"
    is_nan = exact.isnan()
    bad = result.isnan() != is_nan
    info = torch.finfo(result.dtype)
    ulp = torch.exp2(exact.abs().clamp(min=info.tiny).log2().floor()) * info.eps
    error = ((result.double() - exact).abs() - _matrix(slack)) / ulp
    error = error.masked_fill(is_nan | (result.double() == exact), 0)
    is_bad = bad | (error > _HALF_ULP)
    if not bool(is_bad.any()):
        return ""
    row = _first(is_bad.any(1))
    column = _first(is_bad[row])
    place = f"row {row}, column {column}"
    if len(shape) == 3:
        place = f"expert {row}, element {list(divmod(column, shape[2]))}"
    worst = math.inf if bool(bad.any()) else float(error.max())
    return (
        f"{place}: got {float(result[row, column]):.6g}, exactly {float(exact[row, column]):.6g}; "
        f"worst error {worst:.3g} units in the last place, {_HALF_ULP:.3g} allowed"
    )


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(len(values), math.prod(values.shape[1:]))


def _words(kinds: Sequence[Any]) -> str:
    words = [
        each if isinstance(each, str) else f"{str(each[1]).removeprefix('torch.')} {list(each[0])}" for each in kinds
    ]
    return ", ".join(words) or "nothing"


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [t for t in vars(values).values() if isinstance(t, Tensor)] if hasattr(values, "__dict__") else []


def _as_list(result: Any) -> list[Any]:
    return [part for each in result for part in _as_list(each)] if isinstance(result, list | tuple) else [result]


def _first(mask: Tensor) -> int:
    found = mask.nonzero()
    return int(found[0]) if len(found) else -1
