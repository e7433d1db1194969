"""The command `mok-modular`.

Results go to stdout, progress to stderr. `--json` prints exactly one JSON object on stdout. Exit codes: 0
fine, 1 a check failed or the run broke, 2 wrong arguments (one line on stderr).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mok_modular import cli_look
from mok_modular.build import TARGETS, BuildError, check_target, compile_plans, host_build_info
from mok_modular.config import PRESETS, MoEShape, MoKConfig
from mok_modular.errors import MoKPeerError, MoKTimeoutError, format_table
from mok_modular.nvrtc import CompileError
from mok_modular.plan import Plan, all_plans
from mok_modular.precision import PRECISIONS
from mok_modular.testing import MAX_RATIO, REPLAYED

if TYPE_CHECKING:
    from mok_modular.group import LocalGroup
    from mok_modular.testing import PassesResult, StageStats, TensorCheck, Workload
    from mok_modular.trace import Trace

# Data-flow order, for the list of stages; any other comes behind these.
_STAGE_FILES = (*REPLAYED, "ring")

_STAGE_NOTE = "rows, MB, GFLOP, busy (inside tiles) and wait (suspended at waits) are sums over ranks and workers"
_CHECK_NOTE = (
    "distances from float64; torch: its BF16 matmuls, rounded and in mxfp8 quantized at the same places; "
    f"ok up to {MAX_RATIO} of it"
)

DEFAULT_HIDDEN_SIZE = 256
DEFAULT_INTERMEDIATE_SIZE = 384
DEFAULT_SHARED_INTERMEDIATE_SIZE = 128


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; raises SystemExit(2) for wrong arguments."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.command(args))
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        parser.exit(2, f"mok-modular {args.name}: error: {_one_line(error)}\n")
    except (MoKTimeoutError, MoKPeerError, BuildError, ImportError, CompileError) as error:
        print(f"mok-modular {args.name}: {type(error).__name__}: {error}", file=sys.stderr)
        if args.json:
            _print_json({"ok": False, "error": str(error)})
        return 1


def _make_parser() -> _Parser:
    parser = _Parser(prog="mok-modular", description="Expert-parallel mixture-of-experts layers, stage by stage.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="forward and backward on captured routing: stages, the check of output and gradients"
    )
    _add_workload_options(run)
    run.add_argument("--mode", default="fused", help="fused, split or a plan string (default: fused)")
    run.add_argument("--trace", type=Path, metavar="FILE", help="write what every worker did, for ui.perfetto.dev")
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="plant a fault, such as drop:x_ready,rank=1 (mok_modular.testing.faults); may be given several times",
    )
    run.set_defaults(command=_run)

    ab = commands.add_parser("ab", help="fused against split in one run: times, and whether the bits agree")
    _add_workload_options(ab)
    ab.add_argument("--iters", type=int, default=5, help="timed rounds after one warm-up round (default: 5)")
    ab.add_argument(
        "--plans",
        choices=("two", "all"),
        default="two",
        help="fused and split, or all 16 plans (default: two)",
    )
    ab.add_argument("--timeline", type=Path, metavar="FILE", help="draw split beside fused (needs matplotlib)")
    ab.set_defaults(command=_ab)

    stages = commands.add_parser("stages", help="the stages, their contracts and the active implementation")
    stages.add_argument(
        "--only",
        choices=REPLAYED,
        metavar="NAME",
        help="run this stage alone on captured routing, against its reference",
    )
    stages.add_argument("--dump", type=Path, metavar="DIR", help="with --only: save its results to DIR/NAME.pt")
    cli_look.add_stage_options(stages)
    _add_capture_options(stages)
    stages.set_defaults(command=_stages)

    build = commands.add_parser("build", help="compiles GPU targets ahead of time; how the host target was compiled")
    build.add_argument(
        "--target", default="host", help=f"of: {', '.join(TARGETS)}; several joined by ',' (default: host)"
    )
    which = build.add_mutually_exclusive_group()
    which.add_argument(
        "--split", dest="plan", action="store_const", const="split", help="the kernels of the split plan"
    )
    which.add_argument("--fused", dest="plan", action="store_const", const="fused", help="those of the fused plan")
    which.add_argument("--plan", metavar="PLAN", help="those of a plan such as 'dispatch|gate_up+swiglu|down|combine'")
    build.set_defaults(command=_build)

    doctor = commands.add_parser("doctor", help="what is wrong with the installation and how to mend it")
    doctor.add_argument("--shape", default="tiny", help="of the layer whose memory is told: a preset or H,I,E,K[,S]")
    doctor.add_argument("--ranks", type=int, default=4, help="ranks of that layer (default: 4)")
    doctor.add_argument("--tokens", type=int, default=256, help="its tokens a rank (default: 256)")
    doctor.set_defaults(command=_doctor)

    for command in (run, ab, stages, build, doctor, *cli_look.add_commands(commands)):
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Which tokens a layer of which size works on."""
    parser.add_argument("--ranks", type=int, help="ranks in this process (default: the routing's)")
    parser.add_argument(
        "--shape",
        help=f"H,I,E,K[,S] or one of: {', '.join(PRESETS)}; E and K must fit the routing "
        f"(default: the captured layer's; {DEFAULT_HIDDEN_SIZE},{DEFAULT_INTERMEDIATE_SIZE},E,K,"
        f"{DEFAULT_SHARED_INTERMEDIATE_SIZE} with the routing's E and K where the capture does not say)",
    )
    parser.add_argument("--tokens", type=int, help="tokens of each rank (default: those of the first capture)")
    parser.add_argument("--routing", type=Path, metavar="FILE", help="captured routing (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of --order random (default: 0)")


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    _add_capture_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu, or the GPU that all ranks share, such as cuda:0")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="of the routed experts' products (default: bf16)"
    )
    parser.add_argument(
        "--order",
        choices=("round_robin", "random", "last_first"),
        default="round_robin",
        help="which worker the scheduler resumes (default: round_robin)",
    )
    parser.add_argument(
        "--executor",
        choices=("fibers", "threads"),
        default="fibers",
        help="what a worker is (default: fibers)",
    )
    parser.add_argument("--workers", type=int, help="workers of each rank (default: the library's choice)")


def _run(args: argparse.Namespace) -> int:
    from mok_modular.testing import check_passes, faults, run_passes

    config = MoKConfig(mode=args.mode, trace=args.trace is not None)
    planted = [faults.parse(text) for text in args.fault]
    workload, group, source = _set_up(args)
    progress = _Progress()
    progress(f"{_passes(group)}, {_describe(workload)}, mode {args.mode}")
    try:
        with faults.plant(*planted):
            result = run_passes(group, workload, config)
    finally:
        if args.trace is not None:
            _trace_of(group).save(args.trace)
    progress(f"forward took {result.seconds:.3f} s, backward {result.backward_seconds:.3f} s; checking against float64")
    checks = check_passes(workload, result)
    is_ok = all(check.is_ok for check in checks.values())
    progress("checked")
    if args.json:
        _print_json(
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


def _passes(group: LocalGroup) -> str:
    """What run and ab run there."""
    return "forward and backward" if group.device == "cpu" else "forward (backward runs on CPU ranks only)"


def _trace_of(group: LocalGroup) -> Trace:
    """The trace of the only workspace of a group."""
    return next(iter(group.workspaces.values())).trace()


def _ab(args: argparse.Namespace) -> int:
    from mok_modular.testing import run_passes_plans

    if args.iters < 1:
        raise ValueError(f"--iters must be at least 1, got {args.iters}")
    plans = all_plans() if args.plans == "all" else [Plan.parse("fused"), Plan.parse("split")]
    configs = [MoKConfig(mode=str(plan)) for plan in plans]
    workload, group, _ = _set_up(args)
    progress = _Progress()
    num_rounds = args.iters + 1
    progress(f"{_passes(group)}, {_describe(workload)}, {len(plans)} plans, {num_rounds} rounds")
    results = run_passes_plans(group, workload, configs, num_rounds)
    by_plan = {str(plan): results[i * num_rounds : (i + 1) * num_rounds] for i, plan in enumerate(plans)}
    progress("comparing bits")
    first = results[0]
    differing = {name: _differing(first, rounds) for name, rounds in by_plan.items()}
    medians = {
        name: statistics.median(round_.seconds + round_.backward_seconds for round_ in rounds[1:])
        for name, rounds in by_plan.items()
    }
    names = sorted(set().union(*differing.values()))
    ratio = medians["split"] / medians["fused"]
    if args.timeline is not None:
        _draw_timeline(args)
        progress(f"wrote {args.timeline}")
    if args.json:
        report: dict[str, Any] = {
            "bits_identical": not names,
            "differing": names,
            "fused_s": medians["fused"],
            "split_s": medians["split"],
            "ratio": ratio,
        }
        if args.plans == "all":
            report["plans"] = {
                name: {"median_s": medians[name], "bits_identical": not differing[name]} for name in by_plan
            }
        _print_json(report)
    else:
        rows = [
            (name, f"{medians[name]:.4f}", f"{medians[name] / medians['fused']:.2f}", _same(differing[name]))
            for name in by_plan
        ]
        print(format_table(("plan", "median s", "over fused", "bits"), rows))
        print()
        print(f"split/fused {ratio:.2f}; bits {_same(names)} over {len(results)} runs")
    return 0 if not names else 1


def _draw_timeline(args: argparse.Namespace) -> None:
    from mok_modular.testing import run_forward
    from mok_modular.trace import plot

    traces = {}
    for mode in ("split", "fused"):
        workload, group, _ = _set_up(args)
        run_forward(group, workload, MoKConfig(mode=mode, trace=True))
        traces[mode] = _trace_of(group)
    plot(traces, args.timeline)


def _stages(args: argparse.Namespace) -> int:
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
        _print_json({"stages": rows})
        return 0
    columns = ("name", "implementation", "code")
    header, *lines = format_table(("stage", *columns[1:]), [[row[key] for key in columns] for row in rows]).splitlines()
    print(header)
    for row, line in zip(rows, lines, strict=True):
        print(f"{line}\n    {row['contract']}")
    print(f"\nsources: {_source_folder()}\nthe same in torch: mok_modular.stages.NAME.reference")
    if missing:
        print(f"no implementation: {missing}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    """One stage alone."""
    from mok_modular.testing import replay_stage

    workload, source = _load_workload(args)
    progress = _Progress()
    progress(f"{args.only} alone, {_describe(workload)}")
    replay = replay_stage(args.only, workload)
    if args.dump is not None:
        import torch

        args.dump.mkdir(parents=True, exist_ok=True)
        path = args.dump / f"{args.only}.pt"
        torch.save({"stage": args.only, "routing": source, "results": replay.results}, path)
        progress(f"wrote {path}")
    if args.json:
        _print_json({**replay.to_json(), "routing": source})
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
        _print_json(report)
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
    from mok_modular.doctor import examine

    shape = parse_shape(args.shape, num_experts=0, topk=0)
    if args.tokens < 0:
        raise ValueError(f"--tokens must be at least 0, got {args.tokens}")
    if args.ranks < 1 or shape.num_experts % args.ranks:
        raise ValueError(f"--ranks must divide the number of experts, {shape.num_experts}, got {args.ranks}")
    report = examine(shape, args.ranks, args.tokens)
    if args.json:
        _print_json(report.to_json())
    else:
        print(format_table(("what", "found"), report.facts.items()))
        print()
        for problem in report.problems:
            print(f"{'BROKEN' if problem.is_broken else 'warning'}: {problem.what}\n  mend: {problem.mend}")
        print("ok" if report.is_ok else "something is broken")
    return 0 if report.is_ok else 1


def _set_up(args: argparse.Namespace) -> tuple[Workload, LocalGroup, str]:
    """Inputs, group and the routing's source.

    Raises ValueError or OSError for options that do not fit, BuildError if the extension does not load.
    """
    from mok_modular.calls import check_mxfp8_sizes

    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {args.workers}")
    workload, source = _load_workload(args)
    if args.precision == "mxfp8":
        check_mxfp8_sizes(vars(workload.shape), "cpu")
    # Last, so that wrong options are told even where the extension does not load.
    host_build_info()
    from mok_modular.group import LocalGroup

    group = LocalGroup(
        workload.num_ranks,
        device=args.device,
        order=args.order,
        seed=args.seed,
        executor=args.executor,
        num_workers=args.workers,
    )
    if group.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"--device {args.device}: torch sees no NVIDIA GPU")
        workload = workload.to(group.device)
    return dataclasses.replace(workload, precision=args.precision), group, source


def _load_workload(args: argparse.Namespace) -> tuple[Workload, str]:
    """Inputs by the capture options, and the routing's source. Raises ValueError or OSError for what does not fit."""
    from mok_modular.routing import load_routing
    from mok_modular.testing import Workload

    for name, minimum in (("ranks", 1), ("tokens", 0)):
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise ValueError(f"--{name} must be at least {minimum}, got {value}")
    routing = load_routing(args.routing)
    _, num_captured_ranks, _, topk = routing.expert_ids.shape
    if args.shape is None and routing.shape is not None:
        shape = routing.shape
    else:
        shape = parse_shape(args.shape, num_experts=routing.num_experts, topk=topk)
    num_ranks = num_captured_ranks if args.ranks is None else args.ranks
    workload = Workload.from_routing(routing, shape, num_ranks=num_ranks, num_tokens=args.tokens, seed=args.seed)
    return workload, routing.source


def parse_shape(text: str | None, *, num_experts: int, topk: int) -> MoEShape:
    """Reads a preset's name or `H,I,E,K[,S]`; None is the default size with the given E and K.

    Raises ValueError for anything else and for sizes that MoEShape refuses.
    """
    if text is None:
        return MoEShape(
            "default",
            DEFAULT_HIDDEN_SIZE,
            DEFAULT_INTERMEDIATE_SIZE,
            num_experts,
            topk,
            DEFAULT_SHARED_INTERMEDIATE_SIZE,
        )
    if text in PRESETS:
        return PRESETS[text]
    parts = text.split(",")
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 5):
        raise ValueError(f"--shape must be H,I,E,K[,S] or one of {', '.join(PRESETS)}, got {text!r}")
    return MoEShape(text, *sizes)


class _Progress:
    """Lines on stderr, each with the seconds since the first."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start_s:6.2f} s] {text}", file=sys.stderr, flush=True)


def _describe(workload: Workload) -> str:
    shape = workload.shape
    tokens = sorted({len(x) for x in workload.x})
    ranks = f"{workload.num_ranks} rank{'s' if workload.num_ranks > 1 else ''}"
    return (
        f"{ranks} x {'-'.join(map(str, tokens))} tokens, "
        f"H {shape.hidden_size}, I {shape.intermediate_size}, E {shape.num_experts}, K {shape.topk}, "
        f"S {shape.shared_intermediate_size}, {workload.precision}"
    )


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


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].replace("``", "`").split())


def _code(stage: str) -> str:
    """The header that holds a stage: all of them are stages but `ring`, which is protocol."""
    return f"csrc/{'protocol' if stage == 'ring' else 'stages'}/{stage}.h"


def _source_folder() -> Path:
    """csrc as it was installed, or as it stands beside the package in a checkout."""
    package = Path(__file__).parent
    return next((path for path in (package / "csrc", package.parent / "csrc") if path.is_dir()), package / "csrc")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _print_json(value: dict[str, Any]) -> None:
    """One JSON object; numbers that JSON lacks (NaN, infinities) become null."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
