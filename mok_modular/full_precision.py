"""Products as they are written, whatever the caller has set: for the references, which everything is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def no_autocast() -> Iterator[None]:
    """Inside, torch computes in the dtypes of the tensors."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """The same, and products of float32 tensors are float32 whatever torch.set_float32_matmul_precision says: "medium"
    lets a CPU with BF16 instructions multiply in BF16, "high" a GPU in TF32. Also a decorator."""
    backends: Any = torch.backends
    with no_autocast(), ExitStack() as stack:
        for backend in (backends.mkldnn.matmul, backends.cuda.matmul):
            precision = backend.fp32_precision
            if precision in ("bf16", "tf32"):
                backend.fp32_precision = "ieee"
                stack.callback(setattr, backend, "fp32_precision", precision)
        yield
