"""One stage on one GPU under pytest-benchmark: the kernel's own time, in a whole forward of a preset.

    pytest benchmarks/bench_dispatch.py --benchmark-enable --benchmark-json=dispatch.json

Random data. The weights of every preset, and its rows at T = 8192, are many times the L2, so a round finds nothing of
the one before in it. pytest-benchmark's own columns are host times of a forward; `extra_info` holds what counts: the
median of the kernel by CUDA events, its bytes and FLOPs a second, and the clocks and power behind the last round.
"""

from __future__ import annotations

import statistics
from typing import Any

import machine
import pytest
import torch
from bars_hopper_split import SHAPES, Layer, random_ids

ROUNDS = 30
NUM_EXPERTS = 16

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
all_presets = pytest.mark.parametrize("preset", sorted(SHAPES))
some_tokens = pytest.mark.parametrize("num_tokens", [2048, 8192])


def bench(benchmark: Any, kernel: str, preset: str, num_tokens: int, mode: str = "split") -> None:
    """Times `kernel` of the split plan in forwards of T tokens on one rank with 16 experts."""
    shape = SHAPES[preset]
    layer = Layer(shape, NUM_EXPERTS, shape.topk, num_tokens, mode)
    ids = random_ids(num_tokens, NUM_EXPERTS, shape.topk)
    schedule = layer.schedule(ids)
    shared: Any = layer.workspace.shared
    times_ms: list[float] = []

    def run() -> None:
        if kernel == "schedule":
            shared.is_timing = True
            layer.schedule(ids)
            shared.is_timing = False
            times_ms.append(dict(shared.kernel_times_s())["schedule"] * 1e3)
        else:
            times_ms.append(layer.kernel_ms(schedule)[kernel])

    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=3)
    layer.workspace.check()
    median_ms = statistics.median(times_ms[3:] if len(times_ms) > ROUNDS else times_ms)
    num_bytes, flops = work(kernel, shape.hidden_size, shape.intermediate_size, shape.topk, num_tokens)
    benchmark.extra_info.update(
        {
            "kernel_ms": median_ms,
            "gigabytes_per_s": num_bytes / median_ms * 1e-6,
            "teraflops": flops / median_ms * 1e-9,
            "machine": machine.describe(),
            "clocks": machine.clocks(),
        }
    )


def work(kernel: str, hidden: int, inter: int, topk: int, num_tokens: int) -> tuple[int, int]:
    """Bytes that must move, each operand once, and FLOPs."""
    rows = num_tokens * topk
    elements, flops = {
        "schedule": (2 * rows, 0),  # ids in, one table out (int32: two elements each)
        "dispatch": ((num_tokens + rows) * hidden, 0),
        "gate_up": (rows * (hidden + 2 * inter) + 2 * NUM_EXPERTS * inter * hidden, 4 * rows * inter * hidden),
        "down": (rows * (hidden + inter) + NUM_EXPERTS * inter * hidden, 2 * rows * inter * hidden),
        "swiglu": (3 * rows * inter, 0),
        "combine": (2 * rows * hidden, 0),
        "reduce": ((rows + num_tokens) * hidden, 2 * rows * hidden),
    }[kernel]
    return 2 * elements, flops
