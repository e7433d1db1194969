"""The command `ab`: plans against each other in one run."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok_modular.cli.common import (
    GPU_ITERS,
    HOST_NOTE,
    Progress,
    add_parser,
    add_workload_options,
    check_picture,
    describe,
    describe_gpu_in_words,
    is_gpu,
    make_group,
    passes,
    print_json,
    set_up,
)
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.errors import format_table
from mok_modular.protocol.plan import Plan, all_plans

if TYPE_CHECKING:
    from mok_modular.protocol.trace import Trace
    from mok_modular.ranks.group import LocalGroup
    from mok_modular.testing import PassesResult, Workload

CPU_ITERS = 5


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of this command and returns it."""
    ab = add_parser(
        commands,
        "ab",
        "Times plans against each other in one interleaved run, and tells whether their bits agree.",
        "mok-modular ab",
        "mok-modular ab --plans all --tokens 48 --iters 1 --json",
        "mok-modular ab --plans 'split;dispatch|gate_up+swiglu|down|combine' --timeline both.png",
    )
    add_workload_options(ab)
    ab.add_argument(
        "--iters",
        type=int,
        help=f"The number of timed rounds (default: {CPU_ITERS}, after one round of warm-up; on a GPU {GPU_ITERS}).",
    )
    ab.add_argument(
        "--plans",
        default="two",
        metavar="PLANS",
        help="The plans to compare with the first of them: two (fused and split), all (all 16), or several joined by "
        "';', such as 'fused;dispatch|gate_up+swiglu|down|combine' (default: two).",
    )
    ab.add_argument(
        "--timeline", type=Path, metavar="FILE", help="Draws the last plan beside the first (needs matplotlib)."
    )
    ab.set_defaults(command=_ab)
    return ab


def trace_of(group: LocalGroup) -> Trace:
    """The trace of the only workspace of a group."""
    return next(iter(group.workspaces.values())).trace()


@dataclass
class _Comparison:
    """Seconds by plan, and the tensors whose bits are not those of the first run. `seconds`: forward and backward, on a
    GPU the forward alone. The rest is known on a GPU only."""

    seconds: dict[str, float]
    differing: dict[str, set[str]]
    num_runs: int
    with_schedule: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    is_host_bound: dict[str, bool] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)


def _ab(args: argparse.Namespace) -> int:
    if args.iters is not None and args.iters < 1:
        raise ValueError(f"--iters must be at least 1, got {args.iters}")
    if is_gpu(args) and args.precision == "mxfp8":
        raise ValueError(f"--precision mxfp8: has no kernels for {args.device} in this version, forward in bf16 has")
    configs = {str(plan): MoKConfig(mode=str(plan)) for plan in _plans(args.plans)}
    if args.timeline is not None:
        check_picture(args.timeline)
    workload, group, _ = set_up(args)
    if args.timeline is not None:  # first: it says at once where it cannot be
        _draw_timeline(args, workload, [*configs][-1], next(iter(configs)))
    found = _time_on_gpu(args, workload, group, configs) if is_gpu(args) else _time(args, workload, group, configs)
    names = sorted(set().union(*found.differing.values()))
    if args.json:
        print_json(_ab_report(args, found, names))
    else:
        _print_ab(args, found, names)
    return 0 if not names else 1


def _plans(text: str) -> list[Plan]:
    if text == "two":
        return [Plan.parse("fused"), Plan.parse("split")]
    if text == "all":
        return all_plans()
    try:
        plans = [Plan.parse(each) for each in text.split(";")]
    except ValueError as error:
        raise ValueError(f"--plans must be two, all, or plans joined by ';', got {text!r}: {error}") from None
    if len(set(plans)) < len(plans) or len(plans) < 2:
        raise ValueError(f"--plans must be two, all, or several different plans joined by ';', got {text!r}")
    return plans


def _time(
    args: argparse.Namespace, workload: Workload, group: LocalGroup, configs: Mapping[str, MoKConfig]
) -> _Comparison:
    from mok_modular.testing import run_passes_plans

    progress = Progress()
    num_rounds = (args.iters or CPU_ITERS) + 1
    progress(f"{passes(group)}, {describe(workload)}, {len(configs)} plans, {num_rounds} rounds")
    results = run_passes_plans(group, workload, [*configs.values()], num_rounds)
    by_plan = {name: results[i * num_rounds : (i + 1) * num_rounds] for i, name in enumerate(configs)}
    progress("comparing bits")
    medians = {
        name: statistics.median(round_.seconds + round_.backward_seconds for round_ in rounds[1:])
        for name, rounds in by_plan.items()
    }
    differing = {name: _differing(results[0], rounds) for name, rounds in by_plan.items()}
    return _Comparison(medians, differing, len(results))


def _time_on_gpu(
    args: argparse.Namespace, workload: Workload, group: LocalGroup, configs: Mapping[str, MoKConfig]
) -> _Comparison:
    from mok_modular.testing.timed_forward import CHECKED_ROUNDS, time_forwards
    from mok_modular.testing.timing import describe_gpu

    rounds = args.iters or GPU_ITERS
    Progress()(f"{passes(group)}, {describe(workload)}, {len(configs)} plans, {rounds} timed rounds")
    run = time_forwards(group, workload, configs, rounds=rounds)
    return _Comparison(
        {name: each.forward_ms * 1e-3 for name, each in run.by_name.items()},
        {name: set() if each.is_same else {"output"} for name, each in run.by_name.items()},
        CHECKED_ROUNDS * len(configs),
        {name: each.with_schedule_ms * 1e-3 for name, each in run.by_name.items()},
        {name: each.host_ms * 1e-3 for name, each in run.by_name.items()},
        {name: each.is_host_bound for name, each in run.by_name.items()},
        {**describe_gpu(args.device), "sm_clock_mhz": run.sm_clock_mhz, "rounds": rounds},
    )


def _ab_report(args: argparse.Namespace, found: _Comparison, names: Sequence[str]) -> dict[str, Any]:
    report = {"bits_identical": not names, "differing": names, **_seconds(found.seconds)}
    if found.device:
        report |= {"device": found.device, "with_schedule": _seconds(found.with_schedule)}
        report["host_s"] = found.host
    if args.plans != "two":
        report["plans"] = {
            name: {
                "median_s": found.seconds[name],
                "bits_identical": not found.differing[name],
                **({"with_schedule_s": found.with_schedule[name]} if found.device else {}),
            }
            for name in found.seconds
        }
    return report


def _seconds(by_plan: Mapping[str, float]) -> dict[str, float]:
    """`fused_s` and `split_s` where these plans ran, and `ratio`, the last plan's over the first one's."""
    first, *_, last = by_plan.values()
    named = {f"{name}_s": by_plan[name] for name in ("fused", "split") if name in by_plan}
    return {**named, "ratio": last / first}


def _print_ab(args: argparse.Namespace, found: _Comparison, names: Sequence[str]) -> None:
    first, *_, last = found.seconds
    ratio = found.seconds[last] / found.seconds[first]
    over = f"over {first}"
    if not found.device:
        rows = [
            (name, f"{seconds:.4f}", f"{seconds / found.seconds[first]:.2f}", _same(found.differing[name]))
            for name, seconds in found.seconds.items()
        ]
        print(format_table(("plan", "median s", over, "bits"), rows))
    else:
        cells = [
            (
                name,
                f"{seconds * 1e3:.3f}",
                f"{seconds / found.seconds[first]:.3f}",
                f"{found.with_schedule[name] * 1e3:.3f}",
                f"{found.with_schedule[name] / found.with_schedule[first]:.3f}",
                f"{found.host[name] * 1e3:.3f}{'*' if found.is_host_bound[name] else ''}",
                _same(found.differing[name]),
            )
            for name, seconds in found.seconds.items()
        ]
        print(format_table(("plan", "forward ms", over, "with schedule ms", over, "host ms", "bits"), cells))
        rounds = found.device["rounds"]
        print(f"medians of {rounds} rounds of one interleaved run: every plan once a round, by CUDA events")
        print(f"forward in bf16 (backward and mxfp8 run on CPU ranks only); {describe_gpu_in_words(found.device)}")
        print(HOST_NOTE)
    print()
    print(f"{last}/{first} {ratio:.2f}; bits {_same(names)} over {found.num_runs} runs")


def _draw_timeline(args: argparse.Namespace, workload: Workload, *modes: str) -> None:
    from mok_modular.protocol.trace_plot import plot
    from mok_modular.testing import run_forward

    traces = {}
    for mode in modes:
        group = make_group(args, workload.num_ranks)
        run_forward(group, workload, MoKConfig(mode=mode, trace=True))
        if is_gpu(args):  # that one was cold
            next(iter(group.workspaces.values())).clear_trace()
            run_forward(group, workload, MoKConfig(mode=mode, trace=True))
        traces[mode] = trace_of(group)
    plot(traces, args.timeline)
    Progress()(f"wrote {args.timeline}")


def _differing(first: PassesResult, others: Sequence[PassesResult]) -> set[str]:
    """Names of the tensors whose bits are not those of `first`."""
    import torch

    return {
        name
        for other in others
        for name, parts in first.tensors.items()
        for a, b in zip(parts, other.tensors[name], strict=True)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    }


def _same(differing: Sequence[str] | set[str]) -> str:
    return "identical" if not differing else "DIFFER: " + ", ".join(sorted(differing))
