"""Checks of options and devices: TypeError or ValueError with the argument's name, the value and the rule."""

from __future__ import annotations

import math
from typing import Any

import torch


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_int(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be an int or a float, got {type(value).__name__} ({value!r})")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_device(name: str, tensor: torch.Tensor, wanted: torch.device, whose: str) -> None:
    """`whose` device `wanted` is: the workspace's or the group's."""
    if not is_same_device(tensor.device, wanted):
        raise ValueError(f"{name} must be on the {whose} device, {wanted}, got {tensor.device}")


def is_same_device(a: torch.device, b: torch.device) -> bool:
    """A device without an index is the first of its kind."""
    return a.type == b.type and (a.index or 0) == (b.index or 0)
