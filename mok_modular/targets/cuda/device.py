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
from mok_modular.targets.cuda import nvrtc

ARCH = "sm_90a"
DEFINE = "MOK_TARGET_SM90"
SM_WARPS, CTA_WARPS, LINK_WARPS = 24, 8, 2
"""Warps of copy and element kernels: an SM's, a CTA's, and a CTA's where it pulls rows over links. A link's latency is
hidden by other tasks: there more and smaller CTAs are faster; where all rows are local, slower (docs/hopper.md)."""
GEMM_THREADS = 384
GEMM_SMEM_BYTES = 231424
"""Dynamic shared memory of a GEMM CTA: at least sizeof(Shared) of csrc/targets/sm90/shared.h."""

TRACE_DEFINE = "MOK_TRACE=1"

COPYING = frozenset({"publish", "dispatch", "combine"})


def copy_ring_bytes(num_warps: int) -> int:
    """Dynamic shared memory of a CTA that copies: sizeof(CopyRing) of csrc/targets/cuda/worker.h, asserted there."""
    return -(-num_warps * (4 * 2048 + 4 * 8) // 128) * 128


def copy_kernel(name: str, num_warps: int = CTA_WARPS) -> nvrtc.Kernel:
    """A kernel of one copy or element stage, with CTAs of so many warps."""
    defines = [f"MOK_CTA_WARPS={num_warps}"]
    if name in COPYING:
        defines.append(f"MOK_COPY_RING_BYTES={copy_ring_bytes(num_warps)}")
    return nvrtc.Kernel(f"split/{name}.cu", (f"mok_{name}",), tuple(defines))


COPY_KERNELS = {name: copy_kernel(name) for name in ("schedule", "publish", "dispatch", "swiglu", "combine", "reduce")}
LINK_KERNELS = {"dispatch": copy_kernel("dispatch", LINK_WARPS)}
"""In place of those of the same name where ranks have GPUs of their own."""
GEMM_KERNEL = nvrtc.Kernel(
    "split/grouped_gemm.cu",
    ("mok_gate_up", "mok_down", "mok_shared_gate_up", "mok_shared_down"),
    (f"MOK_GEMM_SMEM_BYTES={GEMM_SMEM_BYTES}",),
)
ENTRIES: dict[tuple[str, ...], str] = {
    **{(name,): name for name in COPY_KERNELS},
    ("gate_up",): "gate_up",
    ("gate_up", "swiglu"): "gate_up",
    ("down",): "down",
    ("down", "combine"): "down",
    ("shared_gate_up",): "shared_gate_up",
    ("shared_down",): "shared_down",
}
"""The kernel that runs a group of stages: in gate_up+swiglu and down+combine the second lives in the epilogue."""


def persistent_kernel(mask: int) -> nvrtc.Kernel:
    """The kernel that holds the stages of a group mask, compiled when a plan asks for it."""
    defines = (f"MOK_GEMM_SMEM_BYTES={GEMM_SMEM_BYTES}", f"MOK_GROUP_MASK={mask}")
    return nvrtc.Kernel("fused/persistent.cu", ("mok_persistent",), defines)


def traced(kernel: nvrtc.Kernel) -> nvrtc.Kernel:
    """The same kernel with the timeline compiled in (csrc/targets/cuda/timeline.h): it has one more parameter."""
    return dataclasses.replace(kernel, defines=(*kernel.defines, TRACE_DEFINE))


def kernel_of(stages: tuple[str, ...], is_pull_combine: bool = False) -> str | int:
    """What runs the stages of a launch: the name of an entry of a split kernel, or the group mask of a persistent one.

    A combine that pulls has tasks of its own, which the kernel of `down` does not know.
    """
    if stages in ENTRIES and not (is_pull_combine and len(stages) > 1 and "combine" in stages):
        return ENTRIES[stages]
    return group_mask(stages)


def check_plan(config: MoKConfig) -> None:
    """Raises ValueError for what this target does not have."""
    if config.stages:
        names = ", ".join(sorted(config.stages))
        raise ValueError(f"stages={{{names}}} is for CPU ranks in this version, {ARCH} does not have it")
    if config.row_block not in (None, 128):
        raise ValueError(f"row_block must be 128 on {ARCH}, got {config.row_block}")


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
        properties = torch.cuda.get_device_properties(index)
        if (properties.major, properties.minor) != (9, 0):
            raise RuntimeError(
                f"cuda:{index} is {properties.name} (sm_{properties.major}{properties.minor}); this version has "
                f"kernels for {ARCH} only"
            )
        self.num_sms = properties.multi_processor_count
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
                cubin = nvrtc.compile_kernel(ARCH, kernel, DEFINE)
                self._persistent[mask, is_traced] = load_kernel(kernel, cubin)[0]["persistent"]
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
        kernels = (*COPY_KERNELS.values(), GEMM_KERNEL)
        for kernel in map(traced, kernels) if is_traced else kernels:
            functions |= load_kernel(kernel, nvrtc.compile_kernel(ARCH, kernel, DEFINE))[0]
        return functions


def load_kernel(kernel: nvrtc.Kernel, cubin: nvrtc.Cubin) -> tuple[dict[str, Function], Any]:
    """Loads compiled code into the current context: its functions by name, and the CUmodule."""
    is_gemm = any(define.startswith("MOK_GEMM_SMEM_BYTES") for define in kernel.defines)
    sizes = [int(define.split("=")[1]) for define in kernel.defines if define.startswith("MOK_CTA_WARPS=")]
    num_warps = sizes[0] if sizes else CTA_WARPS
    functions = {}
    module = check(driver().cuModuleLoadData(cubin.data))
    attributes = driver().CUfunction_attribute
    for entry in kernel.entries:
        name = entry.removeprefix("mok_")
        handle = check(driver().cuModuleGetFunction(module, entry.encode()))
        num_smem_bytes = copy_ring_bytes(num_warps) if name in COPYING else 0
        if is_gemm:
            num_smem_bytes = GEMM_SMEM_BYTES + 1024  # to be aligned
        if num_smem_bytes:
            check(
                driver().cuFuncSetAttribute(
                    handle, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, num_smem_bytes
                )
            )
            check(
                driver().cuFuncSetAttribute(handle, attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
            )
        num_threads, ctas_per_sm = (GEMM_THREADS, 1) if is_gemm else (32 * num_warps, SM_WARPS // num_warps)
        is_traced = TRACE_DEFINE in kernel.defines
        functions[name] = Function(handle, num_threads, num_smem_bytes, ctas_per_sm, is_gemm, is_traced)
    return functions, module


@cache
def get_device(index: int) -> Device:
    """The loaded kernels of GPU `index`."""
    return Device(index)


def encode_map(address: int, dims: tuple[int, ...]) -> bytes:
    """The 128 bytes of a CUtensorMap: BF16, innermost dimension first, boxes of 64 x 64 (x 1), 128-byte swizzle."""
    cu = driver()
    box = (64, 64, 1)[: len(dims)]
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
