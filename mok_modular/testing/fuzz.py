"""Random layers, each run by three plans: the same bits from all of them, as close to float64 as torch's own BF16.

    python -m mok_modular.testing.fuzz --seconds 60 --seed 7                      # on CPU ranks
    python -m mok_modular.testing.fuzz --device cuda:0 --seconds 200 --seed 7
    python -m mok_modular.testing.fuzz --device cuda:0 --seed 7 --case 1234       # one case again

A case is random sizes, tokens by rank, a routing, and options of mok_modular.testing.options; its plans are split,
fused and one of the others. What case k is depends on the seed, k and the target alone. A failure is printed with the
command that repeats it, and the run goes on. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.shapes import MoEShape
from mok_modular.ranks.group import LocalGroup
from mok_modular.testing.checks import check_tensors
from mok_modular.testing.choice_calls import WEIGHTS, Tensors, make_config, run_rank, start_of
from mok_modular.testing.differential import same_bits
from mok_modular.testing.kernels import all_kernels, compile_kernels
from mok_modular.testing.options import ALL, Choice, Target, broken_rule, plain, values_of
from mok_modular.testing.results import TensorCheck
from mok_modular.testing.watchdog import watch
from mok_modular.testing.workload import Workload

OF_THE_CASE = ("mode", "routing", "tokens", "num_ranks", "shared", "swiglu_limit")
"""Options that a case has values of its own for."""
SLOW = {"trace": 0.1, "launch": 0.15, "stages": 0.2, "executor": 0.2}
"""Options that cost more than they find: how often they are not plain."""
MAX_WORK = {"host": 30e6, "sm_90a": 4e9}
"""Rows times H times I of a case, at most."""
MAX_WEIGHTS = {"host": 3e6, "sm_90a": 60e6}
"""Values of one of the routed weights, at most."""
MAX_FAILURES_IN_A_ROW = 10
"""After so many nothing on this device is right any more, and the run ends."""


@dataclass(frozen=True)
class Case:
    """One random layer, its inputs and its options; `plans` are the modes that it is run by."""

    seed: int
    number: int
    shape: MoEShape
    num_tokens: tuple[int, ...]
    routing: str
    swiglu_limit: float | None
    plans: tuple[str, ...]
    choice: Choice

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values; of the options only those that are not plain."""
        target: Target = "host" if self.choice["target"] == "host" else "sm_90a"
        kept = {name: value for name, value in self.choice.items() if value != plain(target).get(name)}
        shape = {name: value for name, value in vars(self.shape).items() if name != "name"}
        return {**vars(self), "shape": shape, "choice": kept}

    def command(self, device: str) -> str:
        """What repeats it."""
        return f"python -m mok_modular.testing.fuzz --device {device} --seed {self.seed} --case {self.number}"


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `failures` in words, one by one, and how far each tensor is from float64."""

    case: Case
    failures: tuple[str, ...]
    checks: Mapping[str, TensorCheck]


def make_case(seed: int, number: int, target: Target) -> Case:
    """Case `number` of a seed."""
    draw = random.Random(f"{seed}/{number}/{target}")
    choice = _random_choice(draw, target)
    unit = 128 if choice["precision"] == "mxfp8" else 64
    num_ranks = 1 if choice["launch"] == "graph" else draw.choice((1, 1, 2, 2, 3, 4, 4, 5, 6, 8))
    while True:
        hidden, inter = (unit * draw.choice((1, 1, 2, 3, 4, 5, 8, 12)) for _ in range(2))
        num_experts = num_ranks * draw.choice((1, 1, 2, 3, 4, 5, 8, 12, 20))
        if num_experts * hidden * inter <= MAX_WEIGHTS[target]:
            break
    shared = unit * draw.choice((0, 0, 1, 2, 3))
    topk = draw.choice((1, 1, 2, 3, 4, 6, 8, 10))
    most = int(MAX_WORK[target] / (hidden * inter * topk * num_ranks))
    num_tokens = _random_tokens(draw, num_ranks, min(most, draw.choice((1, 20, 130, 300, 700, 2000))))
    modes = values_of("host")["mode"]
    partial = draw.choice([mode for mode in modes if mode not in ("split", "fused")])
    return Case(
        seed,
        number,
        MoEShape("fuzz", hidden, inter, num_experts, topk, shared),
        tuple(num_tokens),
        draw.choice(("uniform", "distinct", "skewed", "one expert", "one rank", "missing", "twice", "nobody")),
        draw.choice((None, None, 0.25, 1.0, 7.0)),
        ("split", "fused", partial),
        choice,
    )


def _random_choice(draw: random.Random, target: Target) -> Choice:
    """Values that keep to the rules, for all options but those of the case. `target` is kept with them."""
    values = {name: each for name, each in values_of(target).items() if name not in OF_THE_CASE}
    fixed = {name: plain(target)[name] for name in OF_THE_CASE} | {"num_ranks": 1, "tokens": "even"}

    def pick(name: str) -> Any:
        is_plain = draw.random() > SLOW.get(name, 0.6)
        if name == "windows" and draw.random() < 0.2:  # many options need it
            return ALL
        return values[name][0] if is_plain else draw.choice(values[name])

    choice = fixed | {name: pick(name) for name in values}
    while (rule := broken_rule(choice)) is not None:
        name = draw.choice([name for name in rule.names if name in values])
        choice[name] = pick(name)
    return choice | {"target": target}


def _random_tokens(draw: random.Random, num_ranks: int, most: int) -> list[int]:
    kind = draw.choice(("alike", "alike", "random", "random", "random", "some", "one"))
    if draw.random() < 0.04:
        most = 0
    counts = [most if kind == "alike" else draw.randint(0, most) for _ in range(num_ranks)]
    if kind == "some":
        counts = [count if draw.random() < 0.5 else 0 for count in counts]
    elif kind == "one":
        owner = draw.randrange(num_ranks)
        counts = [count if rank == owner else 0 for rank, count in enumerate(counts)]
    return counts


# ---- inputs ----


def make_workload(case: Case, device: str) -> Workload:
    """The inputs of a case: ids and router weights are the same on every device, the rest is drawn there."""
    ids, weights = [], []
    for rank, count in enumerate(case.num_tokens):
        generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.number * 131 + rank)
        ids.append(_random_ids(case, count, generator).to(device))
        values = torch.randn(count, case.shape.topk, generator=generator)
        values[torch.rand(values.shape, generator=generator) < 0.05] = 0.0
        weights.append(values.to(device))
    workload = Workload.from_ids(case.shape, ids, weights, seed=case.number, swiglu_limit=case.swiglu_limit)
    workload = dataclasses.replace(workload, precision=case.choice["precision"])
    if case.choice["passes"] == "forward":
        return workload
    return dataclasses.replace(workload, d_output=workload.d_outputs())


def _random_ids(case: Case, count: int, generator: torch.Generator) -> Tensor:
    num_experts, topk = case.shape.num_experts, case.shape.topk
    num_local = num_experts // len(case.num_tokens)
    size = (count, topk)
    uniform = torch.randint(0, num_experts, size, generator=generator)
    chances = torch.rand(size, generator=generator)
    if case.routing == "distinct" and topk <= num_experts:
        return torch.rand(count, num_experts, generator=generator).topk(topk, dim=1).indices
    if case.routing == "skewed":
        return (num_experts * chances**4).long().clamp(max=num_experts - 1)
    if case.routing == "one expert":
        return torch.full(size, case.number % num_experts)
    if case.routing == "one rank":
        return uniform % num_local + case.number % len(case.num_tokens) * num_local
    if case.routing == "missing":
        return torch.where(chances < 0.4, -1, uniform)
    if case.routing == "twice":
        return uniform[:, :1].expand(size).contiguous()
    return torch.full(size, -1) if case.routing == "nobody" else uniform


# ---- runs ----


def run_case(case: Case, device: str) -> Outcome:
    """Runs a case by all its plans. What goes wrong, errors and hangs that end included, is in the outcome."""
    failures: list[str] = []
    checks: dict[str, TensorCheck] = {}
    try:
        workload = make_workload(case, device)
        base = _run_plans(case, workload, device, failures)
        if base:
            checks = check_tensors(workload, _checkable(case, base, device))
            failures += [f"too far from float64: {name}: {each}" for name, each in checks.items() if not each.is_ok]
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}")
    return Outcome(case, tuple(failures), checks)


def _run_plans(case: Case, workload: Workload, device: str, failures: list[str]) -> list[Tensors]:
    """Adds what differs between the plans to `failures`; returns the tensors of the first one that ran, by rank."""
    base: list[Tensors] = []
    group = _make_group(case, device)
    for plan in case.plans:
        try:
            calls = _run_plan(case, workload, group, plan)
        except Exception as error:
            failures.append(f"{plan}: {type(error).__name__}: {error}")
            group.workspaces.clear()  # what has failed is not used again
            group = _make_group(case, device)
            continue
        base = base or calls[0]
        for i, ranks in enumerate(calls):
            if differing := _differing(ranks, base):
                failures.append(f"{plan}, call {i + 1}: other bits than before in {', '.join(differing)}")
    group.workspaces.clear()  # a group and its members hold each other: nobody waits for their memory
    return base


def _make_group(case: Case, device: str) -> LocalGroup:
    choice = case.choice
    return LocalGroup(
        len(case.num_tokens),
        device=device,
        order=choice["order"],
        seed=case.number,
        executor=choice["executor"],
        num_workers=choice["num_workers"],
    )


def _run_plan(case: Case, workload: Workload, group: LocalGroup, plan: str) -> list[list[Tensors]]:
    """By call and rank."""
    choice = case.choice | {"mode": plan}
    config = make_config(choice, workload)
    with torch.set_grad_enabled(choice["api"] == "layer" and choice["passes"] != "forward"):
        by_rank = group.run(lambda member: run_rank(member, workload, config, choice))
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def _differing(given: Sequence[Tensors], base: Sequence[Tensors]) -> list[str]:
    found = []
    for rank, (mine, other) in enumerate(zip(given, base, strict=True)):
        if set(mine) != set(other):
            return [f"the list of tensors of rank {rank}"]
        for name in mine:
            a, b = mine[name], other[name]
            if name in ("context_x", "context_gate", "context_up"):  # rows behind the last may hold anything
                a, b = a[: int(mine["num_rows"])], b[: int(other["num_rows"])]
            if not same_bits(a, b):
                found.append(f"{name} of rank {rank}")
    return found


def _checkable(case: Case, base: Sequence[Tensors], device: str) -> dict[str, list[Tensor]]:
    """What can be held against float64, by name and rank: of main_grads what was added, unless it is rounded away."""
    main_grads = case.choice["main_grads"]
    found: dict[str, list[Tensor]] = {}
    for name in base[0]:
        weight = name.removeprefix("d_")
        if name.startswith(("context_", "num_rows")) or (weight in WEIGHTS and main_grads == "bf16"):
            continue
        parts = [tensors[name] for tensors in base]
        if weight in WEIGHTS and main_grads == "fp32":
            index = WEIGHTS.index(weight)
            parts = [part - start_of(index, rank, part.shape, "fp32", device) for rank, part in enumerate(parts)]
        found[name] = parts
    return found


def run_cases(
    seed: int, device: str = "cpu", *, first: int = 0, num_cases: int | None = None, deadline_s: float | None = None
) -> Iterator[Outcome]:
    """Cases one after the other, until there were `num_cases` or `time.perf_counter()` has passed `deadline_s`, or
    MAX_FAILURES_IN_A_ROW have failed."""
    target: Target = "host" if device == "cpu" else "sm_90a"
    num_failed_in_a_row = 0
    number = first
    while (num_cases is None or number < first + num_cases) and num_failed_in_a_row < MAX_FAILURES_IN_A_ROW:
        if deadline_s is not None and time.perf_counter() > deadline_s:
            return
        case = make_case(seed, number, target)
        with watch(f"case {number}\n{_in_words(case, device)}"):
            outcome = run_case(case, device)
        num_failed_in_a_row = num_failed_in_a_row + 1 if outcome.failures else 0
        number += 1
        if device != "cpu" and number % 50 == 0:
            gc.collect()  # what an exception or a graph still holds is memory of the GPU
        yield outcome


def _in_words(case: Case, device: str) -> str:
    return f"  {json.dumps(case.to_json())}\n  {case.command(device)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mok_modular.testing.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:<index> (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default: 0)")
    parser.add_argument("--seconds", type=float, help="end after so many seconds (default: 60, without --cases)")
    parser.add_argument("--cases", type=int, help="end after so many cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.device != "cpu" and args.case is None:
        compile_kernels([*all_kernels(), *all_kernels(is_traced=True)])
    start_s = time.perf_counter()
    if args.case is not None:
        first, num_cases, deadline_s = args.case, 1, None
    else:
        seconds = 60.0 if args.seconds is None and args.cases is None else args.seconds
        first, num_cases = args.first, args.cases
        deadline_s = None if seconds is None else start_s + seconds
    num_run, failed = 0, []
    worst: dict[str, float] = {}
    for outcome in run_cases(args.seed, args.device, first=first, num_cases=num_cases, deadline_s=deadline_s):
        num_run += 1
        for name, check in outcome.checks.items():
            worst[name] = max(worst.get(name, 0.0), check.ratio)
        if outcome.failures:
            failed.append(outcome)
            if not args.json:
                lines = "\n".join(f"  {failure}" for failure in outcome.failures)
                print(f"case {outcome.case.number}:\n{lines}\n{_in_words(outcome.case, args.device)}", flush=True)
        elif args.case is not None and not args.json:
            print(_in_words(outcome.case, args.device))
    seconds = time.perf_counter() - start_s
    if args.json:
        report = {
            "ok": not failed,
            "device": args.device,
            "seed": args.seed,
            "cases": num_run,
            "plans": 3,
            "seconds": seconds,
            "worst_ratio": worst,
            "failures": [{**each.case.to_json(), "failures": each.failures} for each in failed],
        }
        print(json.dumps(report))
    else:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
        print(f"{num_run} cases, {len(failed)} failed, {seconds:.1f} s; largest error over torch's: {ratios}")
    return 1 if failed or not num_run else 0


if __name__ == "__main__":
    sys.exit(main())
