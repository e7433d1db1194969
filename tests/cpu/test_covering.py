"""Every pair of options (with --all every triple) on CPU ranks, and that the table of options has them all."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from typing import Any

import pytest
import torch

from mok_modular import LocalGroup, MoE, MoKConfig
from mok_modular.testing import choice_calls, covering, faults, options
from mok_modular.testing.covering import covering_array, missing, run_array, unplain
from mok_modular.testing.differential import Differential
from mok_modular.testing.options import ALL, EXCLUDED, OPTIONS, RULES, broken_rule, plain, values_of


def arguments_of(what: type) -> set[str]:
    names = set(inspect.signature(what).parameters) - {"self"}
    return {f"{what.__name__}.{name}" for name in names}


def test_every_field_and_argument_is_an_option_or_excluded() -> None:
    there = {f"MoKConfig.{each.name}" for each in dataclasses.fields(MoKConfig)}
    there |= arguments_of(MoE) | arguments_of(LocalGroup)
    in_table = [name for option in OPTIONS for name in option.sets]
    assert set(in_table) | set(EXCLUDED) == there
    assert not set(in_table) & set(EXCLUDED)
    assert all(EXCLUDED.values())
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_rules_name_options_and_each_excludes_something() -> None:
    for rule in RULES:
        values = values_of("host") if "launch" not in rule.names else values_of("sm_90a")
        assert set(rule.names) <= set(values), rule
        rows = [{}]
        for name in rule.names:
            rows = [{**row, name: value} for row in rows for value in values[name]]
        kept = [rule.holds(*(row[name] for name in rule.names)) for row in rows]
        assert any(kept), rule
        assert not all(kept), rule


@pytest.mark.parametrize("target", ["host", "sm_90a"])
def test_plain_choices_and_options_alone_break_no_rule(target: options.Target) -> None:
    assert broken_rule(plain(target)) is None
    assert missing([], target, 1) == [
        ((name, value),) for name, values in values_of(target).items() if len(values) > 1 for value in values
    ]


def test_values_reach_the_config() -> None:
    workload = Differential().workload(plain("host"))
    for option in OPTIONS:
        fields = [name.removeprefix("MoKConfig.") for name in option.sets if name.startswith("MoKConfig.")]
        choices = [
            {**plain("host"), "windows": ALL, "minibatch_size": 512, "precision": "mxfp8", option.name: value}
            for value in option.values
        ]
        configs = [vars(choice_calls.make_config(choice, workload)) for choice in choices]
        for name in fields:
            found = [configs[i][name] for i in range(len(configs))]
            assert all(a != b for i, a in enumerate(found) for b in found[:i]), option.name


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[options.Choice]:
    return covering_array("host", strength_of(request.config))


def strength_of(config: pytest.Config) -> int:
    return 3 if config.getoption("--all") else 2


@pytest.mark.timeout(1800)  # the array of triples takes minutes
def test_every_combination_occurs(rows: list[options.Choice], pytestconfig: pytest.Config) -> None:
    strength = strength_of(pytestconfig)
    assert all(broken_rule(row) is None for row in rows)
    assert all(set(row) == {option.name for option in OPTIONS} for row in rows)
    assert missing(rows, "host", strength) == []
    others = [row for row in rows if (row["mode"], row["ring"]) != ("split", "serial")]
    gaps = missing(others, "host", 2)
    assert (("mode", "split"), ("ring", "serial")) in gaps


def test_combinations_that_rules_forbid_are_not_missing() -> None:
    gaps = missing([], "host", 2)
    assert (("dispatch", "push"), ("windows", 1)) not in gaps
    assert (("dispatch", "push"), ("windows", ALL)) in gaps
    # Only by a third option: pull_once is BF16, and an mxfp8 wire is not.
    assert (("dispatch", "push"), ("wire", "mxfp8")) not in gaps


@pytest.mark.timeout(1800)
def test_every_run_has_the_bits_of_its_base(rows: list[options.Choice]) -> None:
    wrong = [
        f"{number}: {text}; python -m mok_modular.testing.covering --choice '{json.dumps(unplain(choice, 'host'))}'"
        for number, choice, text in run_array(rows)
        if text
    ]
    assert not wrong, "\n".join(wrong)


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Differential()
    choice = {**plain("host"), "mode": "fused", "tokens": "even"}
    assert runs.difference(choice) == ""
    run_rank = choice_calls.run_rank

    def spoiled(member: Any, *arguments: Any) -> list[choice_calls.Tensors]:
        results = run_rank(member, *arguments)
        if member.rank() == 1:
            results[1]["d_routed_up"].view(torch.int16)[2, 3, 4] ^= 1
        return results

    monkeypatch.setattr("mok_modular.testing.differential.run_rank", spoiled)
    assert runs.difference(choice) == "call 2 of 2: other bits in d_routed_up of rank 1"


def test_a_wrong_base_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run_rank = choice_calls.run_rank

    def spoiled(member: Any, *arguments: Any) -> list[choice_calls.Tensors]:
        results = run_rank(member, *arguments)
        results[0]["d_x"] *= 1.1
        return results

    monkeypatch.setattr("mok_modular.testing.differential.run_rank", spoiled)
    text = Differential().difference({**plain("host"), "num_ranks": 1, "tokens": "even"})
    assert text.startswith("DifferenceError: the base of")
    assert "d_x: TensorCheck(" in text


def test_a_hang_is_told_and_the_next_run_is_right() -> None:
    runs = Differential()
    choice = {**plain("host"), "room": "cached", "tokens": "even"}
    assert runs.difference(choice) == ""
    with faults.plant(faults.drop("x_ready", rank=1)):
        text = runs.difference(choice)
    assert text.startswith("MoKDeadlockError: ")
    assert "nobody will publish x_ready" in text
    assert runs.difference(choice) == ""


def test_errors_are_told_with_a_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Differential, "difference", lambda self, choice: "MoKDeadlockError: nobody")
    assert covering.main(["--choice", '{"mode": "split", "windows": "all"}']) == 1
    out = capsys.readouterr().out
    assert "MoKDeadlockError: nobody" in out
    assert """--choice '{"mode": "split", "windows": "all"}'""" in out


@pytest.mark.parametrize(
    ("choice", "words"),
    [('{"dispatch": "push"}', "needs? a ring that holds all rows"), ('{"dispach": "push"}', "no options are dispach")],
)
def test_choices_that_cannot_be(choice: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        covering.main(["--choice", choice])
    assert re.search(words, capsys.readouterr().err)
