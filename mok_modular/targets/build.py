"""Which targets this installation has, and how they were compiled.

The host target is compiled when the package is installed, so there is nothing to do for it but to say whether the
extension loads and what made it. GPU targets are compiled at run time; here they are compiled ahead, into the cache
that a run reads, without a GPU and without a CUDA toolkit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.extension import ExtensionError, extension
from mok_modular.protocol.plan import Plan
from mok_modular.protocol.roster import roster
from mok_modular.targets.cuda import device as cuda_device
from mok_modular.targets.cuda.arch import ARCHES, arch_named

TARGETS = ("host", *(arch.name for arch in ARCHES))
"""The targets that this version has."""


@dataclass(frozen=True)
class BuildInfo:
    """How a target was compiled. `build_hash`: of the sources below csrc/."""

    target: str
    compiler: str
    flags: str
    build_hash: str
    path: str


class BuildError(RuntimeError):
    """A target cannot be used: `reason`, and `mend`, which says what helps."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(f"{reason}; {mend}")
        self.reason, self.mend = reason, mend


def check_target(target: str) -> str:
    """Returns `target`.

    Raises ValueError if this version does not have it.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not available in this version; available: {', '.join(TARGETS)}")
    return target


def host_build_info() -> BuildInfo:
    """Loads the host extension.

    Raises BuildError if it is missing or does not load.
    """
    try:
        host = extension()
    except ExtensionError as error:
        raise BuildError(error.reason, error.mend) from error
    info = host.build_info()
    flags = info["flags"]
    return BuildInfo(
        target="host",
        compiler=str(info["compiler"]),
        flags=flags if isinstance(flags, str) else " ".join(map(str, flags)),
        build_hash=str(info["hash"]),
        path=str(host.__file__),
    )


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of a GPU target as ptxas left it; `path` is its file in the cache."""

    kernel: str
    source: str
    num_registers: int
    num_spill_bytes: int
    is_from_cache: bool
    path: str


def compile_plans(target: str, plans: list[Plan], tell: Callable[[str], None]) -> list[CompiledKernel]:
    """Compiles every kernel that the forward of `plans` launches on a GPU target; `tell` hears what is compiled.

    Raises ValueError for another target or a plan without kernels there, ImportError where NVRTC is missing,
    nvrtc.CompileError where it refuses a source.
    """
    arch = arch_named(target)
    wanted: set[str | int] = {"schedule"}
    for plan in plans:
        cuda_device.check_plan(MoKConfig(mode=str(plan)), arch)
        wanted |= {cuda_device.kernel_of(launch.stages) for launch in plan.launches(1, has_shared=True)}
    kernels = [(kernel, "") for kernel in (*cuda_device.copy_kernels().values(), cuda_device.gemm_kernel())]
    for mask in sorted(each for each in wanted if isinstance(each, int)):
        stages = [stage for i, stage in enumerate(roster().windowed) if mask >> i & 1]
        kernels.append((cuda_device.persistent_kernel(mask), "+".join(stages)))
    report = []
    for kernel, stages_held in kernels:
        names = [entry.removeprefix("mok_") for entry in kernel.entries]
        if not stages_held and not wanted.intersection(names):
            continue
        tell(f"{target}: {kernel.source}" + (f" ({stages_held})" if stages_held else ""))
        cubin = cuda_device.compile_kernel(arch, kernel)
        remarks = _ptxas_remarks(cubin.log)
        report += [
            CompiledKernel(
                f"persistent {stages_held}" if stages_held else name,
                kernel.source,
                *remarks[f"mok_{name}"],
                cubin.is_from_cache,
                str(cubin.path),
            )
            for name in names
            if stages_held or name in wanted
        ]
    return report


def _ptxas_remarks(log: str) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of every kernel in a log of ptxas -v."""
    remarks = {}
    for block in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", block)
        num_registers = re.search(r"Used (\d+) registers", block)
        num_spill_bytes = re.search(r"(\d+) bytes spill stores", block)
        if name and num_registers and num_spill_bytes:
            remarks[name[1]] = (int(num_registers[1]), int(num_spill_bytes[1]))
    return remarks
