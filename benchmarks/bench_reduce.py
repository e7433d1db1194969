"""reduce alone: see stage_bench.py."""

from __future__ import annotations

from typing import Any

from stage_bench import all_presets, bench, needs_gpu, some_tokens


@needs_gpu
@all_presets
@some_tokens
def test_reduce(benchmark: Any, preset: str, num_tokens: int) -> None:
    bench(benchmark, "reduce", preset, num_tokens)
