"""Ends the process where a run has hung and no timeout of the library looks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 180.0
"""How long a run may take. Timeouts of calls end far earlier."""


@contextmanager
def watch(what: str) -> Iterator[None]:
    """A block that must end within LIMIT_S; else the process prints `what` to stderr and exits with code 1."""
    is_over = threading.Event()
    deadline_s = time.monotonic() + LIMIT_S

    def wait() -> None:
        if not is_over.wait(deadline_s - time.monotonic()):
            print(f"no end after {LIMIT_S:g} s: {what}", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
