"""Another kernel holds SMs of a GPU, as a collective of somebody else's might, while a test's kernels must get on.

    with held_sms(num_sms):
        ... enqueue ...
        assert is_over_within(10)

Every kernel that runs meanwhile must have run before, with the same sizes: loading code or allocating memory may wait
for the holding kernel, which waits for the host.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HOLD_LIMIT_S = 120
"""The kernel gives up by itself then: a test that hangs does not keep the GPU."""
SMEM_BYTES = 220 * 1024
"""More than half of an SM's shared memory, so no two CTAs share one, and nothing that copies rows or multiplies fits
beside it. Below the 227 KB that a CTA may have."""

HOLD = """
__device__ unsigned long long now_ns() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
// words[0]: what the host sets to let go; words[1 + i]: CTA i is there. In pinned memory of the host.
extern "C" __global__ void hold(int* words, unsigned long long limit_ns) {
  const unsigned long long begin = now_ns();
  int go_on = 0;
  if (threadIdx.x == 0) {
    asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(words + 1 + blockIdx.x), "r"(1) : "memory");
    while (go_on == 0 && now_ns() - begin < limit_ns) {
      __nanosleep(1000);
      asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(go_on) : "l"(words) : "memory");
    }
  }
  __syncthreads();
}
"""


def num_sms() -> int:
    """SMs of the current GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@contextmanager
def held_sms(num_held: int, within_s: float = 10) -> Iterator[None]:
    """Another kernel has `num_held` SMs of the current GPU for itself, from the first statement of the block to its
    end. Raises RuntimeError where it does not get them within `within_s`."""
    from mok_modular.targets.cuda.device import check, driver, get_device

    cu = driver()
    get_device(torch.cuda.current_device()).make_current()
    function = check(cu.cuModuleGetFunction(check(cu.cuModuleLoadData(compile_hold())), b"hold"))
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuFuncSetAttribute(function, attribute, SMEM_BYTES))
    words = torch.zeros(1 + num_held, dtype=torch.int32).pin_memory()
    arguments: tuple[Any, ...] = (ctypes.c_void_p(words.data_ptr()), ctypes.c_uint64(HOLD_LIMIT_S * 10**9))
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in arguments))
    stream = torch.cuda.Stream()  # it does not wait for the default one, nor that for it
    torch.cuda.synchronize()
    address = ctypes.addressof(pointers)
    check(cu.cuLaunchKernel(function, num_held, 1, 1, 32, 1, 1, SMEM_BYTES, stream.cuda_stream, address, 0))
    try:
        limit = time.monotonic() + within_s
        while int(words[1:].sum()) < num_held:
            if time.monotonic() > limit:
                raise RuntimeError(f"the holding kernel has {int(words[1:].sum())} of {num_held} SMs")
            time.sleep(0.001)
        yield
    finally:
        words[0] = 1
        stream.synchronize()


def compile_hold() -> bytes:
    """The holding kernel for sm_90a."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(HOLD.encode(), b"hold.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a"]
    code = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert code == 0, log.decode()
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def is_over_within(limit_s: float) -> bool:
    """Whether what is on the current stream comes to its end within that time. Does not wait for other streams."""
    end = torch.cuda.Event()
    end.record()
    limit = time.monotonic() + limit_s
    while not end.query() and time.monotonic() < limit:
        time.sleep(0.002)
    return end.query()
