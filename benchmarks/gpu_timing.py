"""What a GPU can do at best, by the interleaved timings of mok_modular.testing.timing."""

from __future__ import annotations

import torch

from mok_modular.testing.timing import DENSE_FLOPS, dense_product, interleaved_ms

__all__ = ["copy_rate_bytes_per_s", "interleaved_ms", "matmul_rate_flops"]


def copy_rate_bytes_per_s(num_bytes: int = 4 << 30) -> float:
    """Device copy, bytes read plus bytes written per second."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    ms = interleaved_ms({"copy": lambda: target.copy_(source)}, rounds=20)["copy"]
    return 2 * num_bytes / (ms * 1e-3)


def matmul_rate_flops() -> float:
    """Dense BF16 product of random matrices, FLOP/s."""
    return DENSE_FLOPS / (interleaved_ms({"matmul": dense_product()}, rounds=20)["matmul"] * 1e-3)
