"""Interleaved timings on a GPU: every contender once a round, so that clocks and power drift alike for all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch


def interleaved_ms(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 30, warmup: int = 3
) -> dict[str, float]:
    """The median milliseconds of each contender, by CUDA events."""
    for _ in range(warmup):
        for run in contenders.values():
            run()
    events = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs) for name, pairs in events.items()}


def copy_rate_bytes_per_s(num_bytes: int = 4 << 30) -> float:
    """Device copy, bytes read plus bytes written per second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    ms = interleaved_ms({"copy": lambda: target.copy_(source)}, rounds=20)["copy"]
    return 2 * num_bytes / (ms * 1e-3)


def matmul_rate_flops(size: int = 8192) -> float:
    """Dense BF16 product of random matrices, FLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = interleaved_ms({"matmul": lambda: a @ b}, rounds=20)["matmul"]
    return 2 * size**3 / (ms * 1e-3)
