"""One stage on one GPU under pytest-benchmark: the kernel's own time, in a whole forward of a preset.

    pytest benchmarks/bench_dispatch.py --benchmark-enable --benchmark-json=dispatch.json

Random data. The weights of every preset, and its rows at T = 8192, are many times the L2, so a round finds nothing of
the one before in it. pytest-benchmark's own columns are host times of a forward; `extra_info` holds what counts: the
median of the kernel by CUDA events, its bytes and FLOPs a second, and the clocks and power behind the last round. The
same figures are printed at the end.
"""

from __future__ import annotations

import statistics
from typing import Any

import machine
import pytest
import torch
from bars_hopper_split import SHAPES, Layer, random_ids

ROUNDS, WARMUP_ROUNDS = 30, 3
NUM_EXPERTS = 16

found_rows: list[tuple[Any, ...]] = []
"""Kernel, preset, tokens, milliseconds, GB/s, TFLOP/s, for the table that conftest.py prints at the end."""


def why_not() -> str:
    """Why this machine cannot run them, "" if it can."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    return "" if torch.cuda.get_device_capability() == (9, 0) else "kernels exist for sm_90a only"


needs_gpu = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run")
all_presets = pytest.mark.parametrize("preset", sorted(SHAPES))
some_tokens = pytest.mark.parametrize("num_tokens", [2048, 8192])


def bench(benchmark: Any, kernel: str, preset: str, num_tokens: int, mode: str = "split") -> None:
    """Times `kernel` of the split plan in forwards of T tokens on one rank with 16 experts."""
    shape = SHAPES[preset]
    layer = Layer(shape, NUM_EXPERTS, shape.topk, num_tokens, mode)
    ids = random_ids(num_tokens, NUM_EXPERTS, shape.topk)
    schedule = layer.schedule(ids)
    times_ms: list[float] = []

    def run() -> None:
        found = layer.schedule_ms(ids) if kernel == "schedule" else layer.kernel_ms(schedule)
        times_ms.append(found[kernel])

    for _ in range(WARMUP_ROUNDS):  # here, so that a run with --benchmark-disable has it too
        run()
    layer.workspace.check()
    times_ms.clear()
    benchmark.pedantic(run, rounds=ROUNDS)
    layer.workspace.check()
    median_ms = statistics.median(times_ms)
    num_bytes, flops = work(kernel, shape.hidden_size, shape.intermediate_size, shape.topk, num_tokens)
    rates = {"gigabytes_per_s": num_bytes / median_ms * 1e-6, "teraflops": flops / median_ms * 1e-9}
    benchmark.extra_info.update(
        {"kernel_ms": median_ms, **rates, "machine": machine.describe(), "clocks": machine.clocks()}
    )
    found_rows.append((kernel, preset, num_tokens, median_ms, *rates.values()))


def work(kernel: str, hidden: int, inter: int, topk: int, num_tokens: int) -> tuple[int, int]:
    """Bytes that must move, each operand once, and FLOPs."""
    rows = num_tokens * topk
    elements, flops = {
        "schedule": (
            2 * 6 * rows,
            0,
        ),  # int32, two elements each: an id in; two words of a row, three of a route out
        "dispatch": ((num_tokens + rows) * hidden, 0),
        "gate_up": (rows * (hidden + 2 * inter) + 2 * NUM_EXPERTS * inter * hidden, 4 * rows * inter * hidden),
        "down": (rows * (hidden + inter) + NUM_EXPERTS * inter * hidden, 2 * rows * inter * hidden),
        "swiglu": (3 * rows * inter, 0),
        "combine": (2 * rows * hidden, 0),
        "reduce": ((rows + num_tokens) * hidden, 2 * rows * hidden),
    }[kernel]
    return 2 * elements, flops
