"""Looks at the machine and the installation, and says what is wrong and how to mend it."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mok_modular
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.extension import source_dir, source_hash
from mok_modular.protocol.shapes import PRESETS, MoEShape
from mok_modular.targets.build import BuildError, host_build_info
from mok_modular.targets.cuda.arch import arch_of, describe

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 10)

_CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")

_HARMFUL_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "it serialises kernel launches, so a split plan cannot overlap its kernels",
    "CUDA_DEVICE_MAX_CONNECTIONS": "few hardware queues serialise the streams that a split plan overlaps",
}


@dataclass(frozen=True)
class Problem:
    """Something wrong. Only what is broken keeps the library from working; the rest costs speed."""

    what: str
    mend: str
    is_broken: bool


@dataclass
class Report:
    """What was found: facts as name -> text, problems, and the bytes of a layer on one rank."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is broken."""
        return not any(problem.is_broken for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """`ok`, `facts`, `memory` and `problems` (what, mend, broken)."""
        return {
            "ok": self.is_ok,
            "facts": self.facts,
            "memory": self.memory,
            "problems": [
                {"what": problem.what, "mend": problem.mend, "broken": problem.is_broken} for problem in self.problems
            ],
        }

    def broken(self, what: str, mend: str) -> None:
        """Adds a problem that keeps the library from working."""
        self.problems.append(Problem(what, mend, is_broken=True))

    def warn(self, what: str, mend: str) -> None:
        """Adds a problem that the library works in spite of."""
        self.problems.append(Problem(what, mend, is_broken=False))


def examine(shape: MoEShape = PRESETS["tiny"], num_ranks: int = 4, num_tokens: int = 256) -> Report:
    """Runs every check; none of them raises. The memory is that of a layer of `shape`, whose E num_ranks divides, with
    the default config."""
    report = Report()
    for check in (_check_python, _check_torch, _check_extension, _check_compiler, _check_cpu, _check_gpus):
        check(report)
    _check_variables(report, dict(os.environ))
    if report.is_ok:
        _tell_memory(report, shape, num_ranks, num_tokens)
        check_layer_runs(report, _tiny_layer)
    return report


def check_layer_runs(report: Report, run: Callable[[], bool]) -> None:
    """Calls `run`, which returns whether a forward and a backward gave the right output and gradients."""
    try:
        is_right = run()
    except Exception as error:  # whatever the installation does wrong is what the user came to see
        report.broken(
            f"a forward and backward on 2 CPU ranks raises {type(error).__name__}: {error}",
            "install the package again; if it stays, report the error with this page",
        )
        return
    if is_right:
        report.facts["layer"] = "2 CPU ranks, fused: right output and gradients"
    else:
        report.broken(
            "a forward and backward on 2 CPU ranks gives a wrong output or gradient",
            "install the package again with another compiler, and report it with this page",
        )


def _tell_memory(report: Report, shape: MoEShape, num_ranks: int, num_tokens: int) -> None:
    from mok_modular.memory import estimate

    report.memory = estimate(shape, MoKConfig(), num_ranks=num_ranks, num_tokens=num_tokens).to_json()
    report.facts["memory of"] = (
        f"a rank, {shape.name} on {num_ranks} ranks x {num_tokens} tokens, default config (docs/memory.md)"
    )
    notes = {
        "workspace": "shared by all layers of its H and K",
        "ring": "of the workspace, bounded by macrobatch_size",
        "carry": "of the workspace",
        "schedule": "a call",
        "context": "a forward in flight",
    }
    for name, num_bytes in report.memory.items():
        report.facts[f"memory: {name}"] = f"{num_bytes / 1e6:,.1f} MB, {notes[name]}"


def _tiny_layer() -> bool:
    import torch

    from mok_modular.ranks.group import LocalGroup
    from mok_modular.testing import Workload, check_passes, run_passes

    shape = MoEShape("doctor", 64, 128, num_experts=4, topk=2, shared_intermediate_size=64)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 4, (8, 2), generator=generator, dtype=torch.int32) for _ in range(2)]
    workload = Workload.from_ids(shape, ids)
    result = run_passes(LocalGroup(2), workload, MoKConfig())
    return all(check.is_ok for check in check_passes(workload, result).values())


def _check_python(report: Report) -> None:
    report.facts["python"] = f"{platform.python_version()} ({sys.executable})"
    report.facts["mok_modular"] = f"{mok_modular.__version__} ({Path(__file__).parents[1]})"
    report.facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.version_info[:2] < MIN_PYTHON:
        report.broken("Python is older than 3.11", "make an environment with Python 3.11 or newer")


def _check_torch(report: Report) -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        report.broken(f"torch does not load: {error}", "pip install 'torch>=2.10'")
        return
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    report.facts["torch"] = f"{torch.__version__} ({kind}), {torch.get_num_threads()} threads"
    if parse_version(torch.__version__) < MIN_TORCH:
        report.broken(f"torch {torch.__version__} is older than 2.10", "pip install 'torch>=2.10'")


def parse_version(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as `2.13.0+cpu`."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int("".join(char for char in minor if char.isdigit()))


def _check_extension(report: Report) -> None:
    try:
        info = host_build_info()
    except BuildError as error:
        report.broken(error.reason, error.mend)
        return
    report.facts["host target"] = f"{info.compiler}, build {info.build_hash} ({info.path})"
    report.facts["host flags"] = info.flags
    try:
        sources = source_dir()
    except FileNotFoundError as error:
        report.warn(f"{error}: no kernels can be compiled for a GPU", "install the package again")
        return
    if source_hash(sources) != info.build_hash:
        report.warn(
            f"the extension was compiled from other sources (hash {info.build_hash}) than {sources} holds now "
            f"({source_hash(sources)})",
            "compile it again; what runs is the old code until then",
        )


def _check_compiler(report: Report) -> None:
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if not words or shutil.which(words[0]) is None:
            continue
        try:
            result = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0 and result.stdout:
            report.facts["compiler"] = f"{command}: {result.stdout.splitlines()[0]}"
            return
    report.warn(
        "no C++ compiler on PATH; one is needed to install from source",
        "install g++ 11 or clang++ 14, or newer",
    )


def _check_cpu(report: Report) -> None:
    fields = _read_cpuinfo(Path("/proc/cpuinfo"))
    name = fields.get("model name") or platform.processor() or platform.machine()
    has = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [feature for feature in _CPU_FEATURES if feature in has]
    report.facts["cpu"] = f"{name}, {_num_usable_cpus()} usable"
    report.facts["cpu features"] = " ".join(features) if features else "unknown"


def _num_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cpuinfo(path: Path) -> dict[str, str]:
    """The first processor's fields; empty where the file is missing."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _check_gpus(report: Report) -> None:
    try:
        import torch

        capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        names = [
            f"{torch.cuda.get_device_name(i)} (sm_{major}{minor})" for i, (major, minor) in enumerate(capabilities)
        ]
    except Exception as error:  # a driver at odds with torch raises many things, and none of them is in the way
        report.facts["gpus"] = f"cannot be listed: {error}"
        return
    found = ", ".join(names) if names else "none"
    report.facts["gpus"] = f"{found}; this version has kernels for {describe()} only, and for some plans"
    if any(map(arch_of, capabilities)):
        _check_gpu_packages(report)


def _check_gpu_packages(report: Report) -> None:
    """What a GPU with kernels here needs to be used."""
    for module, package in (
        ("cuda.bindings.nvrtc", "cuda-python and nvidia-cuda-nvrtc"),
        ("nvshmem", "nvshmem4py-cu13"),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            why = "kernels are compiled with it" if "nvrtc" in module else "ranks in several processes need it"
            report.warn(
                f"{module} does not import ({error}): {why}", f"install {package}: pip install 'mok-modular[cuda]'"
            )


def _check_variables(report: Report, environ: dict[str, str]) -> None:
    for name, why in _HARMFUL_VARIABLES.items():
        if environ.get(name, "0") not in ("", "0"):
            report.warn(f"{name}={environ[name]} is set: {why} (no effect on CPU ranks)", f"unset {name} for GPU runs")
