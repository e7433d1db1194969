"""Compiles every kernel of the sm_90a target and reads the machine code: what ptxas does silently shows only there.

Needs no GPU; needs the wheels nvidia-cuda-nvrtc, cuda-bindings, nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from mok_modular.protocol.extension import source_dir
from mok_modular.protocol.plan import STAGES, all_plans, group_mask
from mok_modular.protocol.roster import roster
from mok_modular.targets.cuda import device as cuda_device
from mok_modular.targets.cuda import nvrtc
from mok_modular.targets.cuda.arch import SM_90A

pytestmark = pytest.mark.slow

MAX_REGISTERS = {"copy": 80, "reduce": 128, "gemm": 168}  # reduce: two CTAs an SM
MAX_SPILL_BYTES = 0
MAX_SMEM_BYTES = 227 * 1024


def find_tool(name: str) -> str:
    """A CUDA binary utility: from its wheel, or from a toolkit."""
    site = Path(sysconfig.get_paths()["purelib"])
    for path in (site / "nvidia/cu13/bin" / name, site / f"nvidia/{name}/bin/{name}"):
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (wheel nvidia-cuda-{name})")
    return found


PERSISTENT = [STAGES, STAGES[1:], STAGES[:2], STAGES[2:4]]
TRACED = {
    "dispatch": cuda_device.copy_kernels()["dispatch"],
    "fused": cuda_device.persistent_kernel(group_mask(STAGES)),
}
LARGE = [
    *(cuda_device.persistent_kernel(group_mask(stages)) for stages in PERSISTENT),
    *map(cuda_device.traced, TRACED.values()),
]
"""Kernels that a second process compiles meanwhile, in a cache of its own: a cache has one lock."""
COMPILE = """
import sys
from mok_modular.targets.cuda import arch, nvrtc
from mok_modular.targets.cuda import device as cuda_device
source, entries, defines = eval(sys.argv[1])
cuda_device.compile_kernel(arch.arch_named(sys.argv[2]), nvrtc.Kernel(source, entries, defines))
"""
ahead: dict[nvrtc.Kernel, Future[Path]] = {}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything is compiled anew, once."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling for a GPU needs cuda-bindings and nvidia-cuda-nvrtc")
    folder = tmp_path_factory.mktemp("ahead")

    def compile_ahead(kernel: nvrtc.Kernel) -> Path:
        command = [sys.executable, "-c", COMPILE, repr(dataclasses.astuple(kernel)), SM_90A.name]
        subprocess.run(command, env={**os.environ, "MOK_CACHE_DIR": str(folder)}, check=True)
        return folder

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setenv("MOK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        ahead.update({kernel: pool.submit(compile_ahead, kernel) for kernel in LARGE})
        yield
        pool.shutdown(cancel_futures=True)


def compiled(kernel: nvrtc.Kernel) -> nvrtc.Cubin:
    with pytest.MonkeyPatch.context() as patch:
        if kernel in ahead:
            patch.setenv("MOK_CACHE_DIR", str(ahead[kernel].result()))
        return cuda_device.compile_kernel(SM_90A, kernel)


def disassemble(cubin: nvrtc.Cubin, folder: Path) -> dict[str, str]:
    """Machine code by kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.data)
    disassembler = Path(find_tool("nvdisasm"))
    text = subprocess.run(
        [find_tool("cuobjdump"), "-sass", str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{disassembler.parent}:/usr/bin:/bin"},
    ).stdout
    parts = re.split(r"Function : (\w+)", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def ptxas_report(cubin: nvrtc.Cubin) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes by kernel, from ptxas' remarks."""
    report = {}
    for block in cubin.log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", block)
        registers = re.search(r"Used (\d+) registers", block)
        spills = re.search(r"(\d+) bytes spill stores", block)
        assert name and registers and spills, block
        report[name[1]] = (int(registers[1]), int(spills[1]))
    return report


ALL = {
    **{name: (kernel, "copy") for name, kernel in cuda_device.copy_kernels().items()},
    **{f"{name} over links": (kernel, "copy") for name, kernel in cuda_device.link_kernels().items()},
    "gemm": (cuda_device.gemm_kernel(), "gemm"),
}


@pytest.mark.parametrize("name", ALL)
def test_kernel(name: str, tmp_path: Path) -> None:
    kernel, kind = ALL[name]
    cubin = compiled(kernel)
    assert not re.search(r"C75\d\d", cubin.log), "ptxas gave up a register budget or serialised the products"
    report = ptxas_report(cubin)
    assert set(report) == set(kernel.entries)
    for entry, (registers, spilled) in report.items():
        assert registers <= MAX_REGISTERS.get(name, MAX_REGISTERS[kind]), f"{entry}: {registers} registers"
        assert spilled <= MAX_SPILL_BYTES, f"{entry}: {spilled} bytes spilled"
    for entry, code in disassemble(cubin, tmp_path).items():
        assert "CONSTANT" not in "".join(re.findall(r"LDG\S*", code)), f"{entry} reads a region past the acquire"
        if kind == "gemm":
            check_gemm(entry, code)
        elif name.removesuffix(" over links") in roster().communicating:
            assert code.count("UBLKCP") >= 2, f"{entry} does not copy rows by the copy engine"
        else:
            assert re.search(r"LDG\.E\.128|LDG\.E\.[A-Z.]*128", code) or name == "schedule", (
                f"{entry} copies in small words"
            )


def check_gemm(entry: str, code: str) -> None:
    assert code.count("HGMMA") > 0, f"{entry} has no wgmma"
    assert code.count("USETMAXREG") == 2, f"{entry}: setmaxnreg was ignored"
    assert not re.search(r"\bF?MMA\b|HMMA", code), f"{entry} multiplies on a slower path"
    # One wait a k block: between two waits stand the HGMMAs of at least one block. And one at the end of a tile, one
    # where there are stores only.
    waits = code.count("WARPGROUP.DEPBAR") - 2
    assert waits * 4 <= code.count("HGMMA"), f"{entry}: {waits} waits for {code.count('HGMMA')} HGMMA"


# What a backward multiplies compiles too; nothing launches these kernels yet. (down_dgrad spills and takes a minute:
# swiglu_backward is unrolled into its stores.)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("product", "max_spill_bytes"),
    [("GateUpDgrad", 0), ("SharedGateUpDgrad", 0), ("DownDgrad", 414)],
)
def test_products_of_a_backward_compile(product: str, max_spill_bytes: int, tmp_path: Path) -> None:
    lines = ['#include "stages/grouped_dgrad.h"', '#include "targets/gemm_driver.h"']
    (tmp_path / "product.cu").write_text(
        "\n".join([*lines, f"using namespace mok; MOK_GEMM_KERNEL(product, {product})"])
    )
    options = nvrtc.compile_options(SM_90A.name, SM_90A.defines)
    data, log = nvrtc.compile_source(tmp_path, "product.cu", options, [source_dir()])
    cubin = nvrtc.Cubin(data, log, tmp_path, is_from_cache=False)
    assert not re.search(r"C75\d\d", log), "ptxas gave up a register budget or serialised the products"
    ((entry, (registers, spilled)),) = ptxas_report(cubin).items()
    assert registers <= MAX_REGISTERS["gemm"]
    assert spilled <= max_spill_bytes
    code = disassemble(cubin, tmp_path)[entry]
    check_gemm(entry, code)
    assert code.count("tnspB") == code.count("HGMMA"), "weights are read with their rows as k"


def test_shared_memory_fits() -> None:
    assert SM_90A.gemm_smem_bytes + 1024 <= MAX_SMEM_BYTES


def persistent_masks() -> set[int]:
    """The groups of stages that need a persistent kernel, over all plans and both ways of combine."""
    return {
        mask
        for plan in all_plans()
        for group in plan.groups
        for is_pull in (False, True)
        if isinstance(mask := cuda_device.kernel_of(group, is_pull), int)
    }


def test_every_plan_has_kernels() -> None:
    """All ten groups of two stages and more, but for those whose second stage lives in the first one's epilogue (and
    down+combine comes back where combine pulls)."""
    assert len(persistent_masks()) == 9
    assert 31 in persistent_masks()
    for plan in all_plans():
        for group in plan.groups:
            kernel = cuda_device.kernel_of(group)
            assert isinstance(kernel, int) or kernel in {
                e.removeprefix("mok_") for k, _ in ALL.values() for e in k.entries
            }


# All stages; with combine and without dispatch; with dispatch and without down; swiglu as tasks of its own.
@pytest.mark.parametrize("stages", PERSISTENT, ids="+".join)
def test_persistent_kernel(stages: tuple[str, ...], tmp_path: Path) -> None:
    kernel = cuda_device.persistent_kernel(group_mask(stages))
    cubin = compiled(kernel)
    assert not re.search(r"C75\d\d", cubin.log), "ptxas gave up a register budget or serialised the products"
    ((registers, _),) = ptxas_report(cubin).values()
    assert registers <= MAX_REGISTERS["gemm"]
    ((entry, code),) = disassemble(cubin, tmp_path).items()
    assert "CONSTANT" not in "".join(re.findall(r"LDG\S*", code)), f"{entry} reads a region past the acquire"
    check_gemm(entry, code)
    # The scheduler and the communicator have 72 registers and spill some. The consumers must not: their code is what
    # holds the products, between the two USETMAXREG.
    parts = re.split(r"USETMAXREG", code)
    consumer = next(part for part in parts if "HGMMA" in part)
    assert all("HGMMA" not in part for part in parts if part is not consumer)
    assert not re.search(r"\b(LDL|STL)\b", consumer), f"{entry}: the consumers use local memory"
    if "dispatch" in stages:
        assert code.count("UBLKCP") >= 2, f"{entry} does not copy rows by the copy engine"


@pytest.mark.parametrize("name", TRACED)
def test_a_timeline_is_in_traced_kernels_alone(name: str, tmp_path: Path) -> None:
    """Without it the clock is read where a wait pauses and nowhere else. With it the consumers still have no spills."""
    plain, traced = compiled(TRACED[name]), compiled(cuda_device.traced(TRACED[name]))
    assert plain.path != traced.path
    assert not re.search(r"C75\d\d", traced.log)
    limit = MAX_REGISTERS["copy" if name == "dispatch" else "gemm"]
    assert all(registers <= limit for registers, _ in ptxas_report(traced).values())
    with_timeline = disassemble(traced, tmp_path)
    for entry, code in disassemble(plain, tmp_path).items():
        assert code.count("GLOBALTIMER") == code.count("NANOSLEEP") > 0, f"{entry} reads the clock without a wait"
        assert with_timeline[entry].count("GLOBALTIMER") > code.count("GLOBALTIMER")
        if name != "dispatch":
            check_gemm(entry, with_timeline[entry])
            consumer = next(part for part in re.split(r"USETMAXREG", with_timeline[entry]) if "HGMMA" in part)
            assert not re.search(r"\b(LDL|STL)\b", consumer), f"{entry}: the consumers use local memory"


def test_cache_is_used_verified_and_repaired() -> None:
    kernel = cuda_device.copy_kernels()["publish"]
    first = compiled(kernel)
    again = compiled(kernel)
    assert again.is_from_cache
    assert (again.data, again.log) == (first.data, first.log)
    content = bytearray(again.path.read_bytes())
    content[-1] ^= 1
    again.path.write_bytes(content)
    repaired = compiled(kernel)
    assert not repaired.is_from_cache, "a damaged file was believed"
    assert repaired.data == first.data


def test_a_source_that_does_not_compile_shows_the_log() -> None:
    broken = nvrtc.Kernel("split/publish.cu", ("mok_publish",), ("Region=5",))
    with pytest.raises(nvrtc.CompileError, match=r"publish\.cu does not compile"):
        compiled(broken)
