"""GPU tests use the data of the CPU tests; without a GPU of compute capability 9.0 they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "cpu"), str(Path(__file__).parents[1])]


def why_not() -> str:
    """Why this machine cannot run the tests, "" if it can."""
    if not torch.cuda.is_available():
        return "they need a GPU of compute capability 9.0, and torch sees none"
    if torch.cuda.get_device_capability() != (9, 0):
        return "they need a GPU of compute capability 9.0"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items if reason else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
