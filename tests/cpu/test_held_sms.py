"""The kernel that holds SMs in tests on a GPU compiles, and asks for no more shared memory than a CTA may have."""

from __future__ import annotations

import held_sms
import pytest


@pytest.mark.slow
def test_it_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling for a GPU needs cuda-bindings and nvidia-cuda-nvrtc")
    assert held_sms.compile_hold().startswith(b"\x7fELF")
    assert 114 * 1024 < held_sms.SMEM_BYTES <= 227 * 1024
