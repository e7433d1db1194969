"""The check of a run's results against float64, measured by what torch's BF16 matmuls are off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mok_modular.testing.results import ForwardResult, PassesResult, TensorCheck
from mok_modular.testing.workload import Workload


def check_forward(workload: Workload, result: ForwardResult) -> dict[str, TensorCheck]:
    """Compares the outputs of all ranks with the float64 reference and with torch's BF16 matmuls.

    Returns one entry per tensor (`output`). An error is 0 where both sides are zeros, NaN if an output is.
    """
    return check_tensors(workload, {"output": result.outputs})


def check_passes(workload: Workload, result: PassesResult) -> dict[str, TensorCheck]:
    """As check_forward, of the output and all gradients."""
    return check_tensors(workload, result.tensors)


def check_tensors(workload: Workload, by_name: Mapping[str, Sequence[Tensor]]) -> dict[str, TensorCheck]:
    """As check_forward, of tensors by name and rank: `output`, and the names of Workload.reference_gradients."""
    truth: dict[str, list[Tensor]] = {}
    rounded: dict[str, list[Tensor]] = {}
    for dtype, into in ((torch.float64, truth), (torch.bfloat16, rounded)):
        if "output" in by_name:
            into["output"] = workload.reference(dtype)
        if set(by_name) - {"output"}:
            into |= workload.reference_gradients(dtype)
    return {
        name: compare(torch.cat(list(parts)), torch.cat(rounded[name]), torch.cat(truth[name]))
        for name, parts in by_name.items()
    }


def compare(value: Tensor, rounded: Tensor, truth: Tensor) -> TensorCheck:
    """How far `value` is from `truth`, in units of how far `rounded` is."""
    error, torch_error = _distance(value, truth), _distance(rounded, truth)
    return TensorCheck(error, torch_error, _quotient(error, torch_error))


def _distance(value: Tensor, truth: Tensor) -> float:
    return _quotient(float((value.double() - truth).norm()), float(truth.norm()))


def _quotient(a: float, b: float) -> float:
    if b == 0:
        return a if a == 0 or math.isnan(a) else math.inf
    return a / b
