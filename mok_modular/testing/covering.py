"""Covering arrays over the options of a layer, and the runs of one, each held against the bits of a plain run.

    python -m mok_modular.testing.covering --strength 2                     # every pair of values, on CPU ranks
    python -m mok_modular.testing.covering --device cuda:0 --strength 3     # every triple that a GPU takes
    python -m mok_modular.testing.covering --device cuda:0 --choice '{"mode": "split", "fwd_num_comm_sms": 5}'

A covering array of strength n is a list of choices in which every n values of different options that the rules allow
together occur together. covertable makes it (the `test` extra has it); `missing` looks, without it, for gaps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import torch

from mok_modular.testing.differential import Differential
from mok_modular.testing.kernels import all_kernels, compile_kernels
from mok_modular.testing.options import RULES, Choice, Target, broken_rule, plain, values_of
from mok_modular.testing.watchdog import watch

MAX_WRONG_IN_A_ROW = 20
"""After so many nothing on a device is right any more."""
Combination = tuple[tuple[str, Any], ...]
"""Some options and a value of each."""


def covering_array(target: Target, strength: int) -> list[Choice]:
    """Choices in which every combination of `strength` values that the rules allow occurs; the same list every time.

    Raises ImportError where covertable is missing, RuntimeError if it leaves something out.
    """
    try:
        from covertable import make
        from covertable.shortcuts import Constraint
    except ImportError as error:
        raise ImportError(f"a covering array needs covertable ({error}): pip install 'mok-modular[test]'") from error
    values = {name: list(each) for name, each in values_of(target).items() if len(each) > 1}
    constraints = []
    for rule in RULES:
        fixed = {name: plain(target)[name] for name in rule.names if name not in values}
        names = [name for name in rule.names if name in values]

        def holds(row: Mapping[str, Any], rule: Any = rule, fixed: Mapping[str, Any] = fixed) -> bool:
            return bool(rule.holds(*(fixed[name] if name in fixed else row[name] for name in rule.names)))

        if names:
            constraints.append(Constraint().fn(names, holds))
    rows = make(values, strength=strength, constraints=constraints)
    return [{**plain(target), **row} for row in rows]


def missing(rows: Iterable[Choice], target: Target, strength: int) -> list[Combination]:
    """The combinations of `strength` values that the rules allow and that are in none of the rows."""
    values = {name: each for name, each in values_of(target).items() if len(each) > 1}
    found = {
        combination for row in rows for combination in combinations([(name, row[name]) for name in values], strength)
    }
    allowed = _Solver(target)
    return [
        combination
        for names in combinations(values, strength)
        for each in product(*(values[name] for name in names))
        if (combination := tuple(zip(names, each, strict=True))) not in found and allowed.complete(dict(combination))
    ]


class _Solver:
    """Completes choices by trying out values, without the library that makes the arrays."""

    def __init__(self, target: Target) -> None:
        self.values = values_of(target)
        self.plain = plain(target)

    def complete(self, given: Mapping[str, Any]) -> Choice | None:
        """A choice that has the given values and breaks no rule; None where there is none."""
        choice = {**self.plain, **given}
        return choice if broken_rule(choice) is None else self._search(dict(given))

    def _search(self, given: Choice) -> Choice | None:
        if broken_rule(given) is not None:
            return None
        # The options that a rule ties to given ones, most of their rule known first; the others stay plain.
        rule = broken_rule({**self.plain, **given})
        if rule is None:
            return {**self.plain, **given}
        name = next(name for name in rule.names if name not in given)
        for value in self.values[name]:
            found = self._search({**given, name: value})
            if found is not None:
                return found
        return None


# ---- runs ----


def run_array(
    rows: Sequence[Choice], device: str = "cpu", *, deadline_s: float | None = None, first: int = 0
) -> Iterator[tuple[int, Choice, str]]:
    """Runs every choice and yields its number, itself and what is wrong, "" where nothing is.

    Ends early, between two runs, when `time.perf_counter()` has passed `deadline_s`, and after MAX_WRONG_IN_A_ROW.
    """
    runs = Differential(device)
    num_wrong_in_a_row = 0
    for number, choice in enumerate(rows):
        if number < first:
            continue
        if deadline_s is not None and time.perf_counter() > deadline_s:
            return
        with watch(f"run {number}\n  --choice '{json.dumps(unplain(choice, runs.target))}'"):
            wrong = runs.difference(choice)
        num_wrong_in_a_row = num_wrong_in_a_row + 1 if wrong else 0
        yield number, choice, wrong
        if num_wrong_in_a_row == MAX_WRONG_IN_A_ROW:
            return


def unplain(choice: Choice, target: Target) -> Choice:
    """The values of a choice that are not the plain ones: what a replay needs."""
    return {name: value for name, value in choice.items() if value != plain(target)[name]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mok_modular.testing.covering",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:<index> (default: cpu)")
    parser.add_argument("--strength", type=int, default=2, help="2: every pair, 3: every triple (default: 2)")
    parser.add_argument("--seconds", type=float, help="end early after so many seconds")
    parser.add_argument("--choice", type=json.loads, help="run one choice: a JSON object of what is not plain")
    parser.add_argument("--first", type=int, default=0, help="start at this run of the array")
    args = parser.parse_args(argv)
    target: Target = "host" if args.device == "cpu" else "sm_90a"
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    if args.choice is not None:
        rows = [{**plain(target), **args.choice}]
        if unknown := sorted(set(args.choice) - set(plain(target))):
            parser.error(f"--choice: no options are {', '.join(unknown)}; options are {', '.join(plain(target))}")
        if (rule := broken_rule(rows[0])) is not None:
            parser.error(f"--choice: {', '.join(rule.names)}: {rule.reason}")
    else:
        rows = covering_array(target, args.strength)
        if target != "host":
            compile_kernels([*all_kernels(), *all_kernels(is_traced=True)])
        print(f"{len(rows)} runs, prepared in {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)
    deadline_s = None if args.seconds is None else start_s + args.seconds
    num_runs = num_wrong = 0
    for number, choice, wrong in run_array(rows, args.device, deadline_s=deadline_s, first=args.first):
        num_runs += 1
        num_wrong += bool(wrong)
        if wrong:
            print(f"run {number}: {wrong}\n  --choice '{json.dumps(unplain(choice, target))}'", flush=True)
    print(f"{num_runs} of {len(rows)} runs, {num_wrong} wrong, {time.perf_counter() - start_s:.1f} s")
    return 1 if num_wrong or num_runs < len(rows) - args.first else 0


if __name__ == "__main__":
    sys.exit(main())
