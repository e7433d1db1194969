"""SwiGLU: the activation between an expert's two matrix products."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """Returns ``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``, in the shape and dtype of ``gate`` and
    ``up``.

    bfloat16 is computed in float32 and rounded once at the end; float32 and float64 keep their own precision.

    With ``limit``, gate is first clamped from above at ``limit`` and up to [-limit, limit]. What is compared
    are the values of the input tensors (so the rounded BF16 gate and up, not the accumulators that they came
    from), against the limit in the precision of the computation. The gradient passes at equality and is zero
    beyond, as in torch.clamp. 0.0 is a limit like any other.

    Raises TypeError when the dtypes differ, ValueError when the shapes differ or the limit is negative or
    NaN.
    """
    if gate.dtype != up.dtype:
        raise TypeError(f"up has dtype {up.dtype} but gate has {gate.dtype}; they must be the same")
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have the same shape, not {tuple(gate.shape)} and {tuple(up.shape)}")
    if limit is not None and (math.isnan(limit) or limit < 0):
        raise ValueError(f"limit={limit} must be None or at least 0")
    dtype = gate.dtype
    if dtype == torch.bfloat16:
        gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * gate.sigmoid() * up).to(dtype)
