"""The expert products alone, gate_up and down: see stage_bench.py."""

from __future__ import annotations

from typing import Any

import pytest
from stage_bench import all_presets, bench, needs_gpu, some_tokens


@needs_gpu
@all_presets
@some_tokens
@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_grouped_gemm(benchmark: Any, preset: str, num_tokens: int, product: str) -> None:
    bench(benchmark, product, preset, num_tokens)
