"""SwiGLU: the activation between an expert's two matrix products."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Tensor | int | None = None) -> Tensor:
    """Returns ``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)``, in the shape and dtype of ``gate`` and
    ``up``.

    bfloat16 is computed in float32 and rounded once at the end; float32 and float64 keep their own precision.

    With ``limit``, gate is first clamped from above at ``limit`` and up to [-limit, limit]. What is compared
    are the values of the input tensors (so the rounded BF16 gate and up, not the accumulators that they came
    from), against the limit in the precision of the computation. The gradient passes at equality and is zero
    beyond (torch.clamp's does so up to 2.13, not in 2.14). 0.0 is a limit like any other.

    ``num_rows``: how many rows of the first dimension count, as a tensor or an int; the others may hold anything and
    come out as zeros. None: all.

    Raises TypeError when the dtypes differ, ValueError when the shapes differ or the limit is negative or
    NaN.
    """
    _check(gate, up, limit)
    if num_rows is not None:
        is_used = torch.arange(len(gate), device=gate.device) < num_rows
        is_used = is_used.view(-1, *[1] * (gate.dim() - 1))
        gate, up = gate.where(is_used, 0), up.where(is_used, 0)
    dtype = gate.dtype
    if dtype == torch.bfloat16:
        gate, up = gate.float(), up.float()
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return (gate * gate.sigmoid() * up).to(dtype)


def launch(
    gate: Tensor,
    up: Tensor,
    limit: float | None = None,
    *,
    num_rows: Tensor | int | None = None,
    group: LocalGroup | None = None,
) -> Tensor:
    """``reference`` by the compiled stage, standing alone in its kernel, on the one rank of ``group`` (a fresh
    LocalGroup if None). gate and up are bfloat16 [..., I] on the CPU or a GPU (where the kernel then runs) with I a
    multiple of 64; no gradients.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device or I.
    """
    device = stage_arguments.check_devices(gate=gate, up=up, num_rows=num_rows)
    _check(gate, up, limit)
    stage_arguments.check_bfloat16(gate=gate, up=up)
    width = gate.shape[-1] if gate.dim() else 0
    stage_arguments.check_width("gate's last dimension", width)
    count = gate.numel() // width
    num_used = count if num_rows is None else int(num_rows) * (count // max(1, len(gate)))
    row_block = stage_arguments.ROW_BLOCKS[0]
    segment_start = torch.tensor([0, -(-count // row_block) * row_block])
    run = stage_run.open_run(
        "swiglu",
        [stage_arguments.segment_tables(segment_start, torch.tensor([count]), row_block)],
        row_block=row_block,
        num_tokens=[0],
        intermediate_size=width,
        device=device,
        group=group,
    )
    for name, tensor in (("ring_gate", gate), ("ring_up", up)):
        run.region(0, name, width).zero_()  # padding rows
        run.fill(0, name, tensor.reshape(count, width)[:num_used])
    run.launch(swiglu_limit=limit)
    return run.region(0, "ring_hidden", width)[:count].clone().view(gate.shape)


def _check(gate: Tensor, up: Tensor, limit: float | None) -> None:
    if gate.dtype != up.dtype:
        raise TypeError(f"up has dtype {up.dtype} but gate has {gate.dtype}; they must be the same")
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have the same shape, not {tuple(gate.shape)} and {tuple(up.shape)}")
    if limit is not None and (math.isnan(limit) or limit < 0):
        raise ValueError(f"limit={limit} must be None or at least 0")
