"""The kernels of the CUDA target: what there is, compiled and loaded on one GPU."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.plan import group_mask
from mok_modular.protocol.roster import roster
from mok_modular.targets.cuda import nvrtc
from mok_modular.targets.cuda.arch import Arch, arch_of, describe

SM_WARPS, CTA_WARPS, LINK_WARPS = 24, 8, 2
"""Warps of copy and element kernels: an SM's, a CTA's, and a CTA's where it pulls rows over links. A link's latency is
hidden by other tasks: there more and smaller CTAs are faster; where all rows are local, slower (docs/hopper.md)."""

TRACE_DEFINE = "MOK_TRACE=1"


def copy_ring_bytes(num_warps: int) -> int:
    """Dynamic shared memory of a CTA that copies: sizeof(CopyRing) of csrc/targets/cuda/worker.h, asserted there."""
    return -(-num_warps * (4 * 2048 + 4 * 8) // 128) * 128


def copy_kernel(name: str, num_warps: int = CTA_WARPS) -> nvrtc.Kernel:
    """A kernel of one copy or element stage, with CTAs of so many warps."""
    defines = [f"MOK_CTA_WARPS={num_warps}"]
    if name in roster().communicating:
        defines.append(f"MOK_COPY_RING_BYTES={copy_ring_bytes(num_warps)}")
    return nvrtc.Kernel(f"split/{name}.cu", (f"mok_{name}",), tuple(defines))


PERSISTENT_SOURCE = "fused/persistent.cu"


@cache
def copy_kernels() -> dict[str, nvrtc.Kernel]:
    """The kernels of the stages of a forward that multiply nothing, by stage."""
    return {stage.name: copy_kernel(stage.name) for stage in roster().forward if not stage.is_product}


@cache
def link_kernels() -> dict[str, nvrtc.Kernel]:
    """In place of those of the same name where ranks have GPUs of their own."""
    return {"dispatch": copy_kernel("dispatch", LINK_WARPS)}


@cache
def gemm_kernel() -> nvrtc.Kernel:
    """The matrix products of a forward, each alone in its kernel."""
    products = [stage for stage in roster().forward if stage.is_product]
    (file,) = {stage.file for stage in products}
    entries = tuple(f"mok_{stage.name}" for stage in products)
    return nvrtc.Kernel(f"split/{file}.cu", entries)


@cache
def entries() -> dict[tuple[str, ...], str]:
    """The kernel that runs a group of stages: its only one, or the one whose epilogue or stores do the other."""
    alone = {(stage.name,): stage.name for stage in roster().forward}
    return alone | {(stage.inside, stage.name): stage.inside for stage in roster().forward if stage.inside}


def persistent_kernel(mask: int) -> nvrtc.Kernel:
    """The kernel that holds the stages of a group mask, compiled when a plan asks for it."""
    return nvrtc.Kernel(PERSISTENT_SOURCE, ("mok_persistent",), (f"MOK_GROUP_MASK={mask}",))


def traced(kernel: nvrtc.Kernel) -> nvrtc.Kernel:
    """The same kernel with the timeline compiled in (csrc/targets/cuda/timeline.h): it has one more parameter."""
    return dataclasses.replace(kernel, defines=(*kernel.defines, TRACE_DEFINE))


def kernel_of(stages: tuple[str, ...], is_pull_combine: bool = False) -> str | int:
    """What runs the stages of a launch: the name of an entry of a split kernel, or the group mask of a persistent one.

    A combine that pulls has tasks of its own, which the kernel of `down` does not know.
    """
    if stages in entries() and not (is_pull_combine and len(stages) > 1 and "combine" in stages):
        return entries()[stages]
    return group_mask(stages)


def check_plan(config: MoKConfig, arch: Arch) -> None:
    """Raises ValueError for what this target does not have on a GPU generation."""
    if config.stages:
        names = ", ".join(sorted(config.stages))
        raise ValueError(f"stages={{{names}}} is for CPU ranks in this version, {arch.name} does not have it")
    if config.row_block not in (None, arch.row_block):
        raise ValueError(f"row_block must be {arch.row_block} on {arch.name}, got {config.row_block}")


def arch_of_gpu(index: int) -> Arch:
    """The generation of GPU `index`. Raises RuntimeError where this version has no kernels for it."""
    properties = torch.cuda.get_device_properties(index)
    arch = arch_of((properties.major, properties.minor))
    if arch is None:
        raise RuntimeError(
            f"cuda:{index} is {properties.name} (sm_{properties.major}{properties.minor}); this version has "
            f"kernels for {describe()} only"
        )
    return arch


@dataclass(frozen=True)
class Function:
    """A loaded kernel: its CUfunction, threads a CTA, dynamic shared memory, CTAs an SM, if it takes tensor maps and
    if it keeps a timeline."""

    handle: Any
    num_threads: int
    num_smem_bytes: int
    ctas_per_sm: int
    has_maps: bool
    is_traced: bool


class Device:
    """The loaded kernels of one GPU. Everything is compiled and loaded before the first launch: loading a module
    while kernels wait for each other can wedge the context."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.arch = arch_of_gpu(index)
        self.num_sms = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.cuda.device(index):
            torch.cuda.current_stream()
            torch.zeros(1, device=f"cuda:{index}")  # the primary context exists from here on
            self._context = check(driver().cuCtxGetCurrent())
            self.functions = self._load()
        self._traced: dict[str, Function] = {}
        self._persistent: dict[tuple[int, bool], Function] = {}

    def make_current(self) -> None:
        """For driver calls in a thread that may not have used the GPU yet."""
        check(driver().cuCtxSetCurrent(self._context))

    def persistent(self, mask: int, is_traced: bool = False) -> Function:
        """The loaded kernel of a group mask, compiled now if it is the first time."""
        if (mask, is_traced) not in self._persistent:
            kernel = traced(persistent_kernel(mask)) if is_traced else persistent_kernel(mask)
            with torch.cuda.device(self.index):
                self.make_current()
                self._persistent[mask, is_traced] = self.load(kernel)["persistent"]
        return self._persistent[mask, is_traced]

    def traced_functions(self) -> dict[str, Function]:
        """`functions` with their timeline, compiled now if it is the first time."""
        if not self._traced:
            with torch.cuda.device(self.index):
                self.make_current()
                self._traced = self._load(is_traced=True)
        return self._traced

    def _load(self, is_traced: bool = False) -> dict[str, Function]:
        functions: dict[str, Function] = {}
        kernels = (*copy_kernels().values(), gemm_kernel())
        for kernel in map(traced, kernels) if is_traced else kernels:
            functions |= self.load(kernel)
        return functions

    def load(self, kernel: nvrtc.Kernel) -> dict[str, Function]:
        """The functions of a kernel, compiled and loaded now. The context must be current."""
        return load_kernel(self.arch, kernel, compile_kernel(self.arch, kernel))[0]


def compile_kernel(arch: Arch, kernel: nvrtc.Kernel) -> nvrtc.Cubin:
    """`kernel` for a GPU generation, from the cache where it is. Raises as nvrtc.compile_kernel does."""
    return nvrtc.compile_kernel(arch.name, kernel, arch.defines)


def load_kernel(arch: Arch, kernel: nvrtc.Kernel, cubin: nvrtc.Cubin) -> tuple[dict[str, Function], Any]:
    """Loads compiled code into the current context: its functions by name, and the CUmodule."""
    is_gemm = kernel.source in (gemm_kernel().source, PERSISTENT_SOURCE)
    sizes = [int(define.split("=")[1]) for define in kernel.defines if define.startswith("MOK_CTA_WARPS=")]
    num_warps = sizes[0] if sizes else CTA_WARPS
    functions = {}
    module = check(driver().cuModuleLoadData(cubin.data))
    attributes = driver().CUfunction_attribute
    for entry in kernel.entries:
        name = entry.removeprefix("mok_")
        handle = check(driver().cuModuleGetFunction(module, entry.encode()))
        num_smem_bytes = copy_ring_bytes(num_warps) if name in roster().communicating else 0
        if is_gemm:
            num_smem_bytes = arch.gemm_smem_bytes + 1024  # to be aligned
        if num_smem_bytes:
            check(
                driver().cuFuncSetAttribute(
                    handle, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, num_smem_bytes
                )
            )
            check(
                driver().cuFuncSetAttribute(handle, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            )
        num_threads, ctas_per_sm = (arch.gemm_threads, 1) if is_gemm else (32 * num_warps, SM_WARPS // num_warps)
        is_traced = TRACE_DEFINE in kernel.defines
        functions[name] = Function(handle, num_threads, num_smem_bytes, ctas_per_sm, is_gemm, is_traced)
    return functions, module


@cache
def get_device(index: int) -> Device:
    """The loaded kernels of GPU `index`."""
    return Device(index)


def encode_map(address: int, dims: tuple[int, ...], operand_box: tuple[int, int]) -> bytes:
    """The 128 bytes of a CUtensorMap: BF16, innermost dimension first, boxes of an operand, 128-byte swizzle."""
    cu = driver()
    box = (*operand_box, 1)[: len(dims)]
    strides = []
    num_bytes = 2
    for dim in dims[:-1]:
        num_bytes *= dim
        strides.append(num_bytes)
    tensor_map = check(
        cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(dims),
            address,
            [cu.cuuint64_t(dim) for dim in dims],
            [cu.cuuint64_t(stride) for stride in strides],
            [cu.cuuint32_t(size) for size in box],
            [cu.cuuint32_t(1)] * len(dims),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(tensor_map.getPtr()), 128)


@cache
def driver() -> Any:
    """cuda.bindings.driver. Raises ImportError with the way to mend it."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise ImportError(f"the CUDA target needs cuda-python ({error}); {nvrtc.NEEDS}") from error
    return bindings


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call. Raises RuntimeError with the driver's text where it failed."""
    code, *values = result
    if int(code) != 0:
        text = driver().cuGetErrorString(code)[1]
        raise RuntimeError(f"CUDA driver: {text.decode() if text else code}")
    return values[0] if len(values) == 1 else values
