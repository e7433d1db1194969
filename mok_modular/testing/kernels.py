"""The kernels of the GPU target, compiled in several processes before a run that needs many of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from mok_modular.protocol.plan import all_plans
from mok_modular.targets.cuda import device, nvrtc


def all_kernels(*, is_traced: bool = False) -> list[nvrtc.Kernel]:
    """Those of every plan, those that take longest first. is_traced: the same with their timeline."""
    masks = {
        kernel
        for plan in all_plans()
        for group in plan.groups
        for is_pull in (False, True)
        if isinstance(kernel := device.kernel_of(group, is_pull), int)
    }
    persistent = [device.persistent_kernel(mask) for mask in sorted(masks, reverse=True)]
    kernels = [device.gemm_kernel(), *persistent, *device.copy_kernels().values()]
    return [device.traced(kernel) for kernel in kernels] if is_traced else kernels


def compile_kernels(kernels: Sequence[nvrtc.Kernel], num_processes: int | None = None) -> None:
    """Compiles for the current GPU what the cache does not hold yet, in `num_processes` (None: one per core).

    Raises what nvrtc.compile_kernel raises, RuntimeError where this version has no kernels for the GPU.
    """
    arch = device.arch_of_gpu(torch.cuda.current_device())
    num_processes = min(len(kernels), num_processes or len(os.sched_getaffinity(0)))
    # spawn: CUDA does not outlive a fork.
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(partial(device.compile_kernel, arch), kernels):
            pass
