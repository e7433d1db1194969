"""mok_modular.testing.fuzz: cases that depend on their number alone, what it finds, how it tells, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mok_modular.testing import choice_calls, faults, fuzz
from mok_modular.testing.fuzz import make_case, make_workload, run_case, run_cases
from mok_modular.testing.options import Target, broken_rule, values_of

SPOILED = "mok_modular.testing.fuzz.run_rank"


def test_random_cases_are_right() -> None:
    outcomes = list(run_cases(seed=3, num_cases=15))
    assert len(outcomes) == 15
    assert [outcome for outcome in outcomes if outcome.failures] == []
    assert max(check.ratio for outcome in outcomes for check in outcome.checks.values()) < 1.5


@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_a_case_depends_on_seed_and_number_alone(target: Target) -> None:
    cases = [make_case(5, number, target) for number in range(30)]
    assert cases == [make_case(5, number, target) for number in reversed(range(30))][::-1]
    assert len({json.dumps(case.to_json()) for case in cases}) == 30
    assert make_case(6, 0, target).to_json() != cases[0].to_json()


def test_so_do_its_values() -> None:
    case = make_case(0, first_case_with_rows(), "host")
    first, again = (make_workload(case, "cpu") for _ in range(2))
    for name in ("x", "expert_ids", "router_weights", "d_output"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(first, name), getattr(again, name), strict=True))
    assert torch.equal(first.weights.routed_down, again.weights.routed_down)


@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_cases_take_every_value_and_keep_to_the_rules(target: Target) -> None:
    cases = [make_case(1, number, target) for number in range(600)]
    for name, values in values_of(target).items():
        if name not in fuzz.OF_THE_CASE:
            assert {case.choice[name] for case in cases} == set(values), name
    assert all(broken_rule(case.choice) is None for case in cases)
    assert {len(case.num_tokens) for case in cases} == {1, 2, 3, 4, 5, 6, 8}
    assert {plan for case in cases for plan in case.plans} == set(values_of("host")["mode"])
    assert all(case.plans[:2] == ("split", "fused") and len(set(case.plans)) == 3 for case in cases)
    assert sum(not any(case.num_tokens) for case in cases) > 6
    assert Counter(case.routing for case in cases).keys() == {
        "uniform", "distinct", "skewed", "one expert", "one rank", "missing", "twice", "nobody"
    }  # fmt: skip
    sizes = [(case.shape.hidden_size, case.shape.intermediate_size) for case in cases]
    assert all(size % 64 == 0 for pair in sizes for size in pair)
    assert any(hidden % 128 for hidden, _ in sizes)
    assert all(not s % 128 for case, pair in zip(cases, sizes, strict=True) for s in pair if is_mxfp8(case))
    rows = [sum(case.num_tokens) * case.shape.topk for case in cases]
    assert max(rows) > 1000
    assert all(row * h * i <= fuzz.MAX_WORK[target] for row, (h, i) in zip(rows, sizes, strict=True))


def is_mxfp8(case: fuzz.Case) -> bool:
    return bool(case.choice["precision"] == "mxfp8")


def spoiling(spoil: Callable[[Any, list[choice_calls.Tensors]], None], plan: str | None = None) -> Callable[..., Any]:
    """run_rank, whose results `spoil(member, results)` changes; `plan`: in this mode only."""

    def run_rank(member: Any, workload: Any, config: Any, choice: Any) -> list[choice_calls.Tensors]:
        results = choice_calls.run_rank(member, workload, config, choice)
        if plan in (None, choice["mode"]):
            spoil(member, results)
        return results

    return run_rank


def flip(member: Any, results: list[choice_calls.Tensors]) -> None:
    """One bit of one value."""
    if len(results[1]["output"]):
        results[1]["output"].view(torch.int16)[0, 5] ^= 1


def first_case_with_rows() -> int:
    """In BF16, with a backward, and tokens on every rank."""
    cases = (make_case(0, number, "host") for number in range(1000))
    return next(
        case.number
        for case in cases
        if all(case.num_tokens) and not is_mxfp8(case) and case.choice["passes"] == "both" and case.routing == "uniform"
    )


def test_one_other_bit_is_a_failure_with_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = first_case_with_rows()
    monkeypatch.setattr(SPOILED, spoiling(flip, "fused"))
    assert fuzz.main(["--case", str(number)]) == 1
    out = capsys.readouterr().out
    assert "fused, call 2: other bits than before in output of rank 0" in out
    assert f"python -m mok_modular.testing.fuzz --device cpu --seed 0 --case {number}" in out
    assert '"num_tokens": [' in out
    assert "1 cases, 1 failed" in out
    assert fuzz.main(["--case", str(number), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["cases"] == 1
    assert report["failures"][0]["number"] == number
    assert report["failures"][0]["failures"][0].startswith("fused, call 2")


def test_the_same_wrong_values_in_every_plan_are_seen_by_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(member: Any, results: list[choice_calls.Tensors]) -> None:
        for result in results:
            result["output"] *= 1.02

    monkeypatch.setattr(SPOILED, spoiling(spoil))
    case = make_case(0, first_case_with_rows(), "host")
    (failure,) = run_case(case, "cpu").failures
    assert failure.startswith("too far from float64: output: TensorCheck(")


def test_an_error_is_a_failure_and_the_other_plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(member: Any, results: list[choice_calls.Tensors]) -> None:
        raise RuntimeError("a lost cause")

    monkeypatch.setattr(SPOILED, spoiling(spoil, "split"))
    outcome = run_case(make_case(0, first_case_with_rows(), "host"), "cpu")
    assert outcome.failures == ("split: RuntimeError: a lost cause",)
    assert outcome.checks["output"].is_ok


def test_a_hang_is_a_failure_and_the_next_case_runs() -> None:
    case = make_case(0, first_case_with_rows(), "host")
    with faults.plant(faults.drop("done", rank=0)):
        outcome = run_case(case, "cpu")
    assert len(outcome.failures) == 3
    assert all("Error: " in failure and "nobody will publish done" in failure for failure in outcome.failures)
    assert run_case(case, "cpu").failures == ()


def test_a_device_on_which_everything_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SPOILED, lambda *_: 1 / 0)
    outcomes = list(run_cases(seed=0, num_cases=100))
    assert len(outcomes) == fuzz.MAX_FAILURES_IN_A_ROW
    assert all("ZeroDivisionError" in outcome.failures[0] for outcome in outcomes)


def test_a_case_without_an_end_ends_the_process() -> None:
    code = """
import time
from mok_modular.testing import fuzz, watchdog
watchdog.LIMIT_S = 0.5
fuzz.run_rank = lambda *_: time.sleep(60)
fuzz.main(["--cases", "1", "--seed", "4"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "no end after 0.5 s: case 0" in done.stderr
    assert "--seed 4 --case 0" in done.stderr


def test_time_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seconds", "0.5", "--first", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["cases"] >= 1
    assert set(report["worst_ratio"]) >= {"output"}
