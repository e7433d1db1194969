"""Prints what the stages' benchmarks found: pytest-benchmark's own table has host times only."""

from __future__ import annotations

import sys
from typing import Any

from mok_modular.protocol.errors import format_table


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = getattr(sys.modules.get("stage_bench"), "found_rows", [])
    if not found:
        return
    cells = [
        (kernel, preset, num_tokens, f"{ms:.4f}", f"{gigabytes:.0f}", f"{teraflops:.1f}" if teraflops else None)
        for kernel, preset, num_tokens, ms, gigabytes, teraflops in found
    ]
    header = ("kernel", "preset", "tokens", "ms", "GB/s", "TFLOP/s")
    terminalreporter.section("kernels alone, medians by CUDA events")
    terminalreporter.write_line(format_table(header, cells))
