"""The command `mok-modular`.

Results go to stdout, progress to stderr. `--json` prints exactly one JSON object on stdout. Exit codes: 0
fine, 1 a check failed or the run broke, 2 wrong arguments (one line on stderr), 130 after Ctrl-C, 141 where the reader
of a pipe has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mok_modular
from mok_modular.cli import ab as cli_ab
from mok_modular.cli import look as cli_look
from mok_modular.cli import sweep as cli_sweep
from mok_modular.cli.common import (
    Parser,
    Progress,
    add_capture_options,
    add_parser,
    add_workload_options,
    check_output,
    describe,
    examples,
    load_workload,
    parse_shape,
    passes,
    print_json,
    set_up,
)
from mok_modular.cli.exit import run_command
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.errors import format_table
from mok_modular.protocol.extension import source_dir
from mok_modular.protocol.plan import Plan
from mok_modular.targets.build import TARGETS, BuildError, check_target, compile_plans, host_build_info
from mok_modular.testing import MAX_RATIO, REPLAYED

if TYPE_CHECKING:
    from mok_modular.testing import StageStats, TensorCheck

# Data-flow order, for the list of stages; any other comes behind these.
_STAGE_FILES = (*REPLAYED, "ring")

_STAGE_NOTE = "rows, MB, GFLOP, busy (inside tiles) and wait (suspended at waits) are sums over ranks and workers"
_CHECK_NOTE = (
    "distances from float64; torch: its BF16 matmuls, rounded and in mxfp8 quantized at the same places; "
    f"ok up to {MAX_RATIO} of it"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; raises SystemExit(2) for wrong arguments."""
    return run_command(_make_parser(), argv)


def _make_parser() -> Parser:
    parser = Parser(
        prog="mok-modular",
        description="Expert-parallel mixture-of-experts layers, stage by stage.",
        epilog=examples("mok-modular run", "mok-modular run --help", "mok-modular doctor"),
    )
    parser.add_argument("--version", action="version", version=f"mok-modular {mok_modular.__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = add_parser(
        commands,
        "run",
        "Runs forward and backward on captured routing; shows the stages and checks output and gradients.",
        "mok-modular run --mode split --ranks 2 --tokens 64",
        "mok-modular run --precision mxfp8 --json",
        "mok-modular run --order random --seed 3 --executor threads --ranks 8",
        "mok-modular run --mode split --tokens 48 --fault drop:x_ready,rank=1 --trace waits.json",
    )
    add_workload_options(run)
    run.add_argument(
        "--mode", default="fused", help="Which stages share a kernel: fused, split or a plan string (default: fused)."
    )
    run.add_argument(
        "--trace", type=Path, metavar="FILE", help="Writes what every worker did, for https://ui.perfetto.dev."
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="Plants a fault, such as drop:x_ready,rank=1 (mok_modular.testing.faults). May be given several times.",
    )
    run.set_defaults(command=_run)

    stages = add_parser(
        commands,
        "stages",
        "Lists the stages with contract, implementation and source; with --only runs one of them alone.",
        "mok-modular stages",
        "mok-modular stages --only dispatch --routing random --tokens 64",
        "mok-modular stages --only swiglu --input swiglu.pt --dump results",
    )
    stages.add_argument(
        "--only",
        choices=REPLAYED,
        metavar="NAME",
        help="Runs this stage alone on captured routing and compares it with its reference.",
    )
    stages.add_argument(
        "--dump", type=Path, metavar="DIR", help="Saves the results of the stage of --only to DIR/NAME.pt."
    )
    cli_look.add_stage_options(stages)
    add_capture_options(stages)
    stages.set_defaults(command=_stages)

    build = add_parser(
        commands,
        "build",
        "Tells how the host target was compiled; compiles GPU targets ahead of time, without a GPU.",
        "mok-modular build",
        "mok-modular build --target sm_90a --fused",
    )
    build.add_argument(
        "--target",
        default="host",
        help=f"The target, or several joined by ',', of {', '.join(TARGETS)} (default: host).",
    )
    which = build.add_mutually_exclusive_group()
    which.add_argument(
        "--split",
        dest="plan",
        action="store_const",
        const="split",
        help="Compiles the kernels of the split plan (this is the default).",
    )
    which.add_argument(
        "--fused", dest="plan", action="store_const", const="fused", help="Compiles the kernels of the fused plan."
    )
    which.add_argument(
        "--plan",
        metavar="PLAN",
        help="Compiles the kernels of another plan, such as 'dispatch|gate_up+swiglu|down|combine'.",
    )
    build.set_defaults(command=_build)

    doctor = add_parser(
        commands,
        "doctor",
        "Tells what is wrong with the machine or the installation and how to mend it, and what memory a layer needs.",
        "mok-modular doctor",
        "mok-modular doctor --shape kimi-k2.7 --ranks 64 --tokens 4096",
    )
    doctor.add_argument(
        "--shape", default="tiny", help="The layer whose memory is told: a preset or H,I,E,K[,S] (default: tiny)."
    )
    doctor.add_argument("--ranks", type=int, default=4, help="The number of ranks of that layer (default: 4).")
    doctor.add_argument("--tokens", type=int, default=256, help="Its tokens per rank (default: 256).")
    doctor.set_defaults(command=_doctor)

    others = (cli_ab.add_command(commands), cli_sweep.add_command(commands), *cli_look.add_commands(commands))
    for command in (run, stages, build, doctor, *others):
        command.add_argument("--json", action="store_true", help="Prints one JSON object on stdout and nothing else.")
    return parser


def _run(args: argparse.Namespace) -> int:
    from mok_modular.testing import check_passes, faults, run_passes

    config = MoKConfig(mode=args.mode, trace=args.trace is not None)
    planted = [faults.parse(text) for text in args.fault]
    if args.trace is not None:
        check_output(args.trace)
    workload, group, source = set_up(args)
    progress = Progress()
    progress(f"{passes(group)}, {describe(workload)}, mode {args.mode}")
    try:
        with faults.plant(*planted):
            result = run_passes(group, workload, config)
    finally:
        if args.trace is not None and group.workspaces:  # of a run that broke, too
            cli_ab.trace_of(group).save(args.trace)
    progress(f"forward took {result.seconds:.3f} s, backward {result.backward_seconds:.3f} s; checking against float64")
    checks = check_passes(workload, result)
    is_ok = all(check.is_ok for check in checks.values())
    progress("checked")
    if args.json:
        print_json(
            {
                "ok": is_ok,
                "config": dataclasses.asdict(config),
                "precision": workload.precision,
                "ranks": workload.num_ranks,
                "shape": dataclasses.asdict(workload.shape),
                "num_tokens": [len(x) for x in workload.x],
                "routing": source,
                "seconds": result.seconds,
                "backward_seconds": result.backward_seconds,
                "stages": [stage.to_json() for stage in result.stages],
                "check": {name: dataclasses.asdict(check) for name, check in checks.items()},
            }
        )
    else:
        print(_stage_table(result.stages))
        print(_STAGE_NOTE)
        print()
        print(_check_table(checks))
        print(_CHECK_NOTE)
    return 0 if is_ok else 1


def _stages(args: argparse.Namespace) -> int:
    if args.dump is not None and args.dump.exists() and not args.dump.is_dir():
        raise ValueError(f"--dump must be a folder or a new name, and {args.dump} is a file")
    if args.only is not None:
        return _replay(args) if args.input is None else cli_look.run_stage(args)
    if args.input is not None:
        raise ValueError("--input needs --only NAME")
    if args.dump is not None:
        raise ValueError("--dump needs --only NAME")
    package = importlib.import_module("mok_modular.stages")
    missing = ""
    try:
        host_build_info()
    except BuildError as error:
        missing = str(error)
    rows = []
    for name in sorted(package.__all__, key=lambda name: (*_STAGE_FILES, name).index(name)):
        module = importlib.import_module(f"mok_modular.stages.{name}")
        rows.append(
            {
                "name": name,
                "contract": _first_sentence(inspect.getdoc(module.reference) or ""),
                "implementation": "none" if missing else "host, compiled",
                "code": _code(name),
            }
        )
    if args.json:
        print_json({"stages": rows})
        return 0
    columns = ("name", "implementation", "code")
    header, *lines = format_table(("stage", *columns[1:]), [[row[key] for key in columns] for row in rows]).splitlines()
    print(header)
    for row, line in zip(rows, lines, strict=True):
        print(f"{line}\n    {row['contract']}")
    print(f"\nsources: {source_dir()}\nthe same in torch: mok_modular.stages.NAME.reference")
    if missing:
        print(f"no implementation: {missing}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    """One stage alone."""
    from mok_modular.testing import replay_stage

    workload, source = load_workload(args, args.tokens)
    progress = Progress()
    progress(f"{args.only} alone, {describe(workload)}")
    replay = replay_stage(args.only, workload)
    if args.dump is not None:
        import torch

        args.dump.mkdir(parents=True, exist_ok=True)
        path = args.dump / f"{args.only}.pt"
        torch.save({"stage": args.only, "routing": source, "results": replay.results}, path)
        progress(f"wrote {path}")
    if args.json:
        print_json({**replay.to_json(), "routing": source})
    else:
        header = ("stage", "rows", "seconds", "values", "other bits", "ratio", "verdict")
        ratio = None if replay.check is None else f"{replay.check.ratio:.3f}"
        counts = (replay.num_rows, f"{replay.seconds:.4f}", replay.num_values, replay.num_differing)
        print(format_table(header, [(replay.name, *counts, ratio, "ok" if replay.is_ok else "FAILED")]))
        print(
            "other bits than the torch reference has; ratio: the distance from float64 over the reference's "
            f"(arithmetic alone; ok up to {MAX_RATIO})"
        )
    return 0 if replay.is_ok else 1


def _build(args: argparse.Namespace) -> int:
    targets = [check_target(target) for target in args.target.split(",")]
    plans = [Plan.parse(args.plan)] if args.plan else [Plan.parse("split")]
    report: dict[str, Any] = {"ok": True}
    for target in targets:
        if target == "host":
            report["host"] = dataclasses.asdict(host_build_info())
        else:
            report[target] = [dataclasses.asdict(kernel) for kernel in compile_plans(target, plans, _tell)]
    if args.json:
        print_json(report)
        return 0
    for target in targets:
        if target == "host":
            print("The host target is compiled when the package is installed, for every plan; the extension loads.")
            print(format_table(("what", "value"), report["host"].items()))
        else:
            columns = ("kernel", "source", "num_registers", "num_spill_bytes", "is_from_cache")
            print(f"{target}, plan {plans[0]}:")
            print(format_table(columns, [[row[column] for column in columns] for row in report[target]]))
            print(f"cache: {Path(report[target][0]['path']).parent}")
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _doctor(args: argparse.Namespace) -> int:
    from mok_modular.cli.doctor import examine

    shape = parse_shape(args.shape, num_experts=0, topk=0)
    if args.tokens < 0:
        raise ValueError(f"--tokens must be at least 0, got {args.tokens}")
    if args.ranks < 1 or shape.num_experts % args.ranks:
        raise ValueError(f"--ranks must divide the number of experts, {shape.num_experts}, got {args.ranks}")
    report = examine(shape, args.ranks, args.tokens)
    if args.json:
        print_json(report.to_json())
    else:
        print(format_table(("what", "found"), report.facts.items()))
        print()
        for problem in report.problems:
            print(f"{'BROKEN' if problem.is_broken else 'warning'}: {problem.what}\n  mend: {problem.mend}")
        print("ok" if report.is_ok else "something is broken")
    return 0 if report.is_ok else 1


def _stage_table(stages: Sequence[StageStats]) -> str:
    header = ("stage", "pass", "kernel", "rows", "MB", "GFLOP", "busy s", "wait s")
    rows = [
        (
            stage.name,
            stage.pass_name,
            stage.kernel,
            stage.num_rows,
            f"{stage.num_bytes / 1e6:.2f}",
            f"{stage.flops / 1e9:.3f}" if stage.flops else None,
            f"{stage.busy_s:.4f}",
            f"{stage.wait_s:.4f}",
        )
        for stage in stages
    ]
    return format_table(header, rows)


def _check_table(checks: dict[str, TensorCheck]) -> str:
    rows = [
        (
            name,
            f"{check.error:.3e}",
            f"{check.torch_error:.3e}",
            f"{check.ratio:.3f}",
            "ok" if check.is_ok else "FAILED",
        )
        for name, check in checks.items()
    ]
    return format_table(("check", "error", "torch error", "ratio", "verdict"), rows)


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].replace("``", "`").split())


def _code(stage: str) -> str:
    """The header that holds a stage: all of them are stages but `ring`, which is protocol."""
    return f"csrc/{'protocol' if stage == 'ring' else 'stages'}/{stage}.h"


if __name__ == "__main__":
    sys.exit(main())
