"""What commands share: which layer on which tokens, the ranks that run it, progress, JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mok_modular.calls.precision import PRECISIONS
from mok_modular.protocol.shapes import PRESETS, MoEShape
from mok_modular.targets.build import host_build_info
from mok_modular.targets.cuda.nvrtc import CompileError

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup
    from mok_modular.testing import Workload

DEFAULT_HIDDEN_SIZE = 256
DEFAULT_INTERMEDIATE_SIZE = 384
DEFAULT_SHARED_INTERMEDIATE_SIZE = 128

RANDOM = Path("random")
"""What `--routing` takes for routes that nothing has chosen."""
RANDOM_RANKS, RANDOM_TOKENS = 4, 256
"""Where nothing says otherwise; a captured routing has its own."""

GPU_ITERS = 15
"""Timed rounds on a GPU, where nothing says otherwise."""

MAX_SEED = 2**64 - 1

CPU_OPTIONS: dict[str, Any] = {"order": "round_robin", "executor": "fibers", "workers": None}
"""Options of the ranks on the CPU, which a GPU lacks, and what they are by default."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose examples keep their lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def examples(*lines: str) -> str:
    """The end of a --help."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_parser(commands: Any, name: str, what: str, *lines: str) -> argparse.ArgumentParser:
    """Adds a command: what it does, in a sentence, and examples."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, epilog=examples(*lines))
    return parser


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Which layer, how it is routed, on how many ranks."""
    parser.add_argument("--ranks", type=int, help="The number of ranks, all in this process (default: the routing's).")
    parser.add_argument(
        "--shape",
        help=f"The layer's sizes: H,I,E,K[,S] or one of {', '.join(PRESETS)}. E and K must fit the routing. Default: "
        f"the captured layer's; {DEFAULT_HIDDEN_SIZE},{DEFAULT_INTERMEDIATE_SIZE},E,K,"
        f"{DEFAULT_SHARED_INTERMEDIATE_SIZE} with the routing's E and K where the capture does not say.",
    )
    parser.add_argument(
        "--experts",
        type=int,
        help="Replaces E of the shape: the experts that the ranks here hold of a larger layer.",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="The captured routing to replay (default: the shipped one), or 'random': K different experts per token, "
        "for any shape and any number of tokens.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seeds the inputs and --order random (default: 0).")


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """Which tokens a layer of which size works on."""
    add_layer_options(parser)
    parser.add_argument("--tokens", type=int, help="The tokens of each rank (default: those of the first capture).")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        help="Where the ranks run: cpu, or the GPU that all share, such as cuda:0 (default: cpu).",
    )


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """The same, and who runs it."""
    add_capture_options(parser)
    add_device_option(parser)
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bf16",
        help="The number format of the routed experts' products: bf16 or mxfp8 (default: bf16).",
    )
    parser.add_argument(
        "--order",
        choices=("round_robin", "random", "last_first"),
        help="Which worker the scheduler of CPU ranks resumes: round_robin, random or last_first "
        "(default: round_robin).",
    )
    parser.add_argument(
        "--executor",
        choices=("fibers", "threads"),
        help="What a worker of a CPU rank is: fibers, which take turns on one thread, or threads (default: fibers).",
    )
    parser.add_argument(
        "--workers", type=int, help="The number of workers of each CPU rank (default: the library's choice)."
    )


# ---- devices ----


def is_gpu(args: argparse.Namespace) -> bool:
    """Raises ValueError for a device that is neither."""
    if args.device != "cpu" and not args.device.startswith("cuda"):
        raise ValueError(f"--device must be cpu or a GPU such as cuda:0, got {args.device!r}")
    return bool(args.device != "cpu")


def refuse(args: argparse.Namespace, names: list[str], why: str) -> None:
    """Raises ValueError if one of these options was given."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} {getattr(args, name)}: {why}")


def check_device(args: argparse.Namespace) -> None:
    """Raises ValueError where there is no such GPU, or this version has no kernels for it."""
    if not is_gpu(args):
        return
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch sees no NVIDIA GPU")
    try:
        index = torch.device(args.device).index or 0
    except RuntimeError:
        raise ValueError(f"--device must be cpu or a GPU such as cuda:0, got {args.device!r}") from None
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device {args.device}: torch sees {torch.cuda.device_count()} GPUs, the first is cuda:0")
    from mok_modular.targets.cuda.device import get_device

    print(f"loading kernels for {args.device}, which compiles them the first time", file=sys.stderr, flush=True)
    try:
        get_device(index)
    except CompileError:
        raise
    except RuntimeError as error:
        raise ValueError(f"--device {args.device}: {error}") from None


def make_group(args: argparse.Namespace, num_ranks: int) -> LocalGroup:
    """Ranks by the options that `args` has. Raises BuildError if the extension does not load."""
    host_build_info()
    from mok_modular.ranks.group import LocalGroup

    given = {name: getattr(args, name, None) or default for name, default in CPU_OPTIONS.items()}
    return LocalGroup(
        num_ranks,
        device=args.device,
        order=given["order"],
        seed=args.seed,
        executor=given["executor"],
        num_workers=given["workers"],
    )


# ---- workloads ----


def set_up(args: argparse.Namespace) -> tuple[Workload, LocalGroup, str]:
    """Inputs, group and the routing's source.

    Raises ValueError or OSError for options that do not fit, BuildError if the extension does not load.
    """
    from mok_modular.calls.checks import check_mxfp8_sizes

    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {args.workers}")
    if is_gpu(args):
        refuse(args, list(CPU_OPTIONS), f"for CPU ranks, {args.device} has none")
    check_device(args)
    workload, source = load_workload(args, args.tokens)
    if args.precision == "mxfp8":
        check_mxfp8_sizes(vars(workload.shape), "cpu")
    # Last, so that wrong options are told even where the extension does not load.
    group = make_group(args, workload.num_ranks)
    if group.device != "cpu":
        workload = workload.to(group.device)
    return dataclasses.replace(workload, precision=args.precision), group, source


def load_workload(
    args: argparse.Namespace, num_tokens: int | None, default_sizes: tuple[int, int, int] | None = None
) -> tuple[Workload, str]:
    """Inputs by the layer options, and the routing's source; random ones are made on `args.device`. default_sizes: H, I
    and S of a layer whose capture does not say. Raises ValueError or OSError for what does not fit."""
    from mok_modular.routing import load_routing
    from mok_modular.testing import Workload

    for name, value, minimum in (("ranks", args.ranks, 1), ("tokens", num_tokens, 0), ("experts", args.experts, 1)):
        if value is not None and value < minimum:
            raise ValueError(f"--{name} must be at least {minimum}, got {value}")
    if not 0 <= args.seed <= MAX_SEED:
        raise ValueError(f"--seed must be 0 to {MAX_SEED}, got {args.seed}")
    if args.routing == RANDOM:
        shape = _with_experts(args, parse_shape(args.shape or "tiny", num_experts=0, topk=0))
        num_ranks = RANDOM_RANKS if args.ranks is None else args.ranks
        num_tokens = RANDOM_TOKENS if num_tokens is None else num_tokens
        device = getattr(args, "device", "cpu")
        _check_ranks(shape, num_ranks)
        if device == "cpu":
            _check_memory(shape, num_ranks, num_tokens)
        workload = Workload.random(shape, num_ranks=num_ranks, num_tokens=num_tokens, seed=args.seed, device=device)
        return workload, "random"
    routing = load_routing(args.routing)
    _, num_captured_ranks, _, topk = routing.expert_ids.shape
    if args.shape is None and routing.shape is not None:
        shape = routing.shape
    else:
        shape = parse_shape(args.shape, num_experts=routing.num_experts, topk=topk, default_sizes=default_sizes)
    shape = _with_experts(args, shape)
    num_ranks = num_captured_ranks if args.ranks is None else args.ranks
    _check_ranks(shape, num_ranks)
    try:
        workload = Workload.from_routing(routing, shape, num_ranks=num_ranks, num_tokens=num_tokens, seed=args.seed)
    except ValueError as error:  # the routing holds too little for this shape, or too few tokens
        raise ValueError(f"{error} (--routing random takes any shape and number of tokens)") from None
    return workload, routing.source


def _check_ranks(shape: MoEShape, num_ranks: int) -> None:
    if shape.num_experts % num_ranks:
        raise ValueError(
            f"--ranks must divide the number of experts: got {num_ranks} ranks and {shape.num_experts} experts"
        )


def _check_memory(shape: MoEShape, num_ranks: int, num_tokens: int) -> None:
    """Raises ValueError where this machine has less memory than inputs, weights and workspaces take."""
    from mok_modular.memory import estimate
    from mok_modular.protocol.config import MoKConfig

    num_free = free_bytes()
    if num_free is None:
        return
    try:
        memory = estimate(shape, MoKConfig(), num_ranks=num_ranks, num_tokens=num_tokens, has_backward=False)
    except ImportError:  # told where the ranks are made
        return
    hidden, inter = shape.hidden_size, shape.num_experts * shape.intermediate_size + shape.shared_intermediate_size
    num_bytes = num_ranks * (2 * num_tokens * hidden + memory.workspace + memory.schedule) + 6 * hidden * inter
    if num_bytes > num_free:
        raise ValueError(
            f"--tokens {num_tokens} on {num_ranks} ranks of {shape.name} takes at least {num_bytes / 1e9:,.1f} GB, and "
            f"{num_free / 1e9:,.1f} GB of memory are free (mok-modular doctor --shape tells what a layer needs)"
        )


def free_bytes() -> int | None:
    """Memory that this process may still take: what the system has, and its control group allows. None: unknown."""
    found = []
    with contextlib.suppress(OSError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def _with_experts(args: argparse.Namespace, shape: MoEShape) -> MoEShape:
    return shape if args.experts is None else dataclasses.replace(shape, num_experts=args.experts)


def parse_shape(
    text: str | None, *, num_experts: int, topk: int, default_sizes: tuple[int, int, int] | None = None
) -> MoEShape:
    """Reads a preset's name or `H,I,E,K[,S]`; None is the default size with the given E and K.

    Raises ValueError for anything else and for sizes that MoEShape refuses.
    """
    if text is None:
        defaults = DEFAULT_HIDDEN_SIZE, DEFAULT_INTERMEDIATE_SIZE, DEFAULT_SHARED_INTERMEDIATE_SIZE
        hidden_size, intermediate_size, shared_size = default_sizes or defaults
        return MoEShape("default", hidden_size, intermediate_size, num_experts, topk, shared_size)
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


def check_output(path: Path) -> None:
    """Raises ValueError, before anything has run, for a file that could not be written in the end."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for {path.name}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a file is wanted")


def check_picture(path: Path) -> None:
    """The same for a picture; then raises ImportError where matplotlib is missing."""
    from mok_modular.cli.sweep_plot import pyplot

    check_output(path)
    pyplot()


# ---- what is said ----


class Progress:
    """Lines on stderr, each with the seconds since the first."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start_s:6.2f} s] {text}", file=sys.stderr, flush=True)


def describe(workload: Workload) -> str:
    """Ranks, tokens, sizes and precision in words."""
    shape = workload.shape
    tokens = sorted({len(x) for x in workload.x})
    ranks = f"{workload.num_ranks} rank{'s' if workload.num_ranks > 1 else ''}"
    return (
        f"{ranks} x {'-'.join(map(str, tokens))} tokens, "
        f"H {shape.hidden_size}, I {shape.intermediate_size}, E {shape.num_experts}, K {shape.topk}, "
        f"S {shape.shared_intermediate_size}, {workload.precision}"
    )


def passes(group: LocalGroup) -> str:
    """What run and ab run there."""
    return "forward and backward" if group.device == "cpu" else "forward (backward runs on CPU ranks only)"


HOST_NOTE = (
    "host ms: how long schedule and forward keep the host; * marks those where that is nearly all of the time, so that "
    "the host was timed and not the GPU"
)


def describe_gpu_in_words(device: Mapping[str, Any]) -> str:
    """Name, and what is known of driver and clock."""
    driver, clock = device.get("driver"), device.get("sm_clock_mhz")
    parts = [str(device["name"]), f"driver {driver}" if driver else "", f"SMs at {clock} MHz" if clock else ""]
    return ", ".join(part for part in parts if part)


def print_json(value: dict[str, Any]) -> None:
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
