"""The command `sweep`: one forward over a grid of choices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok_modular.cli.common import (
    GPU_ITERS,
    HOST_NOTE,
    RANDOM,
    Progress,
    add_device_option,
    add_layer_options,
    add_parser,
    check_device,
    check_picture,
    describe,
    describe_gpu_in_words,
    is_gpu,
    load_workload,
    make_group,
    print_json,
    refuse,
)
from mok_modular.protocol.errors import format_table

if TYPE_CHECKING:
    from mok_modular.cli.sweep_points import Timing

SWEEP_SIZES = (128, 192, 64)
"""H, I and S of the layer that a sweep on CPU ranks takes by default."""
SWEEP_TOKENS = 64
GPU_SHAPE, GPU_EXPERTS, GPU_TOKENS = "kimi-k2.7", 16, 2048
"""The layer that a sweep on a GPU takes by default, as one of many ranks would hold it, with random routing."""


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Adds the parser of this command and returns it."""
    sweep = add_parser(
        commands,
        "sweep",
        "Runs one forward for every point of a grid: bytes, logical steps and idle waits on CPU ranks, times on a GPU.",
        "mok-modular sweep --over plan=fused,split --tokens 16,64",
        "mok-modular sweep --over direction=pull,push --over imbalance=0,0.5",
        "mok-modular sweep --over macrobatch=256,1024 --over minibatch=128,256 --json",
        "mok-modular sweep --device cuda:0 --over comm_sms=0,8 --tokens 512,2048 --png sweep.png",
    )
    sweep.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="AXIS=V,V",
        help="An axis and its values (default: plan=fused,split). Axes are plan (joined by ';'), tokens, minibatch, "
        "macrobatch, grain, direction, ring, imbalance, workers (CPU ranks) and comm_sms (a GPU; 0: none). Several "
        "--over make a grid.",
    )
    add_layer_options(sweep)
    add_device_option(sweep)
    sweep.add_argument(
        "--tokens",
        metavar="T,T",
        help=f"The tokens of each rank (default: {SWEEP_TOKENS}; on a GPU {GPU_TOKENS}). Several are one more axis.",
    )
    sweep.add_argument("--iters", type=int, help=f"The number of timed rounds on a GPU (default: {GPU_ITERS}).")
    sweep.add_argument("--png", type=Path, metavar="FILE", help="Draws the table (needs matplotlib).")
    sweep.set_defaults(command=_sweep)
    return sweep


def _sweep(args: argparse.Namespace) -> int:
    from mok_modular.cli.sweep_plot import plot_counts
    from mok_modular.cli.sweep_points import check_axes, sweep

    axes = _axes(args)
    is_timed = is_gpu(args)
    check_axes(axes, is_gpu=is_timed)
    if not is_timed:
        refuse(args, ["iters"], "for a GPU; on CPU ranks steps are counted, once")
    if args.iters is not None and args.iters < 1:
        raise ValueError(f"--iters must be at least 1, got {args.iters}")
    if args.png is not None:
        check_picture(args.png)
    if is_timed:
        return _sweep_on_gpu(args, axes)
    if args.ranks is None:
        args.ranks = 4
    workload, _ = load_workload(args, max(axes["tokens"]), SWEEP_SIZES)
    rows = sweep(workload, axes)
    if args.png is not None:
        plot_counts(rows, list(axes), args.png)
    if args.json:
        print_json({"ok": True, "rows": rows})
        return 0
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    print("steps: logical time of the forward; work, wait, idle: worker steps, summed over workers")
    return 0


def _axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Those of --over, and the tokens behind them, unless they are there already."""
    from mok_modular.cli.sweep_points import AXES

    axes: dict[str, list[Any]] = {}
    for text in args.over or ["plan=fused,split"]:
        name, is_pair, values = text.partition("=")
        if not is_pair or name not in AXES:
            raise ValueError(f"--over takes AXIS=V,V with AXIS one of {', '.join(AXES)}; got {text!r}")
        if name in axes:
            raise ValueError(f"--over {name} was given twice")
        separator = ";" if name == "plan" and ";" in values else ","
        try:
            axes[name] = [AXES[name](value) for value in values.split(separator)]
        except ValueError:
            raise ValueError(f"--over {name} takes numbers, got {values!r}") from None
    if "tokens" in axes:
        refuse(args, ["tokens"], "given by --over already")
        return axes
    given = args.tokens or str(GPU_TOKENS if is_gpu(args) else SWEEP_TOKENS)
    try:
        tokens = [int(value) for value in given.split(",")]
    except ValueError:
        raise ValueError(f"--tokens takes a number or several joined by ',', got {given!r}") from None
    return {**axes, "tokens": tokens}


def _sweep_on_gpu(args: argparse.Namespace, axes: Mapping[str, Sequence[Any]]) -> int:
    from mok_modular.cli.sweep_plot import plot_times
    from mok_modular.cli.sweep_points import time_points

    check_device(args)
    progress = Progress()
    args.routing = args.routing or RANDOM
    if args.routing == RANDOM:
        args.ranks = 1 if args.ranks is None else args.ranks
        if args.shape is None:
            args.shape, args.experts = GPU_SHAPE, args.experts or GPU_EXPERTS
    workload, source = load_workload(args, max(axes["tokens"]))
    group = make_group(args, workload.num_ranks)
    workload = workload.to(group.device)
    rounds = args.iters or GPU_ITERS
    progress(f"forward, {describe(workload)} at most, routing: {source}, {rounds} timed rounds")
    timing = time_points(workload, axes, group, rounds=rounds, tell=progress)
    is_ok = all(row["bits_identical"] for row in timing.rows)
    if args.png is not None:
        title = f"{describe(workload)}; {describe_gpu_in_words(timing.device)}\n{_caption(timing, rounds)}"
        plot_times(timing.rows, list(axes), args.png, title)
        progress(f"wrote {args.png}")
    if args.json:
        shape = {name: size for name, size in vars(workload.shape).items() if name != "name"}
        report = {"ok": is_ok, "device": timing.device, "ranks": workload.num_ranks, "shape": shape}
        print_json({**report, "routing": source, "rounds": rounds, "runs": timing.runs, "rows": timing.rows})
    else:
        _print_sweep(timing, axes, rounds)
    return 0 if is_ok else 1


def _caption(timing: Timing, rounds: int) -> str:
    whole = "one interleaved run" if len(timing.runs) == 1 else f"{len(timing.runs)} interleaved runs, column run"
    return f"medians of {rounds} rounds of {whole}: every point of it and a dense bf16 product once a round"


def _print_sweep(timing: Timing, axes: Mapping[str, Sequence[Any]], rounds: int) -> None:
    has_runs = len(timing.runs) > 1
    columns = ("forward ms", "floor/time", "over first", "with schedule ms", "host ms", "bits")
    cells = [
        [
            *(row[name] for name in axes),
            f"{row['forward_ms']:.3f}",
            f"{row['floor_over_time']:.3f}",
            f"{row['over_first']:.3f}",
            f"{row['with_schedule_ms']:.3f}",
            f"{row['host_ms']:.3f}{'*' if row['is_host_bound'] else ''}",
            "identical" if row["bits_identical"] else "DIFFER",
            *((row["run"],) if has_runs else ()),
        ]
        for row in timing.rows
    ]
    print(format_table([*axes, *columns, *(("run",) if has_runs else ())], cells))
    print(_caption(timing, rounds))
    if has_runs:
        print("points with the same tokens and imbalance are a run, and compare (over first, bits) with its first one")
    rates = ", ".join(f"{run['dense_flops'] * 1e-12:.0f}" for run in timing.runs)
    clocks = ", ".join(str(run["sm_clock_mhz"] or "?") for run in timing.runs)
    print(f"floor: the forward's FLOPs at the rate of that product, {rates} TFLOP/s; SMs at {clocks} MHz at the end")
    print(f"forward in bf16 (backward and mxfp8 run on CPU ranks only); {describe_gpu_in_words(timing.device)}")
    print(HOST_NOTE)
