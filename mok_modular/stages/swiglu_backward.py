"""SwiGLU backward: from the gradient of h to those of gate and up, and to what w * h and d_router need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.protocol.sizes import NUM_COLUMNS
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    row_weights: Tensor,
    limit: float | None = None,
    *,
    num_rows: Tensor | int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns d_gate, d_up, weighted_hidden [rows, I] in the dtype of ``gate``, and the rows' d_router by groups of 32
    columns [rows, I/32], float32 for bfloat16.

    ``d_hidden`` is d_y W_down, before the router weight; ``gate`` and ``up`` are those of the forward, all three
    [rows, I] of one dtype; ``row_weights`` [rows] float32 is each row's router weight w (float64 also when gate is).
    With g and u clamped as in swiglu, s = sigmoid(g) and h = silu(g) * u as the forward rounded it:

        d_router = sum over I of d_hidden * h           before the weight: right for weights of zero
        d_gate   = d_hidden * w * u * s * (1 + g * (1 - s))
        d_up     = d_hidden * w * silu(g)
        weighted_hidden = w * h                         what d_down_weight is made of

    bfloat16 is computed in float32; d_gate, d_up and weighted_hidden are rounded once at the end, h once on its own,
    and nothing between d_hidden and d_gate. With ``limit`` the gradient passes where gate or up equals it and is zero
    beyond. Rows from ``num_rows`` on may hold anything and come out as zeros. None: all count.

    Raises TypeError when the dtypes differ, ValueError for wrong shapes or a limit that is negative or NaN.
    """
    _check(d_hidden, gate, up, row_weights, limit)
    if num_rows is not None:
        is_used = torch.arange(len(gate), device=gate.device) < num_rows
        d_hidden, gate, up = (t.where(is_used[:, None], 0) for t in (d_hidden, gate, up))
        row_weights = row_weights.where(is_used, 0)
    dtype = gate.dtype
    precise = torch.float32 if dtype == torch.bfloat16 else dtype
    g, u, d_h = gate.to(precise), up.to(precise), d_hidden.to(precise)
    w = row_weights.to(precise)[:, None]
    gate_passes, up_passes = torch.ones_like(g, dtype=torch.bool), torch.ones_like(u, dtype=torch.bool)
    if limit is not None:
        gate_passes, up_passes = g <= limit, (u <= limit) & (u >= -limit)
        g = torch.where(g > limit, limit, g)
        u = torch.where(u > limit, limit, torch.where(u < -limit, -limit, u))
    sigmoid = g.sigmoid()
    silu = g * sigmoid
    hidden = (silu * u).to(dtype).to(precise)
    weighted = d_h * w
    d_gate = weighted * u * (sigmoid * (1 + g * (1 - sigmoid)))
    return (
        torch.where(gate_passes, d_gate, 0).to(dtype),
        torch.where(up_passes, weighted * silu, 0).to(dtype),
        (w * hidden).to(dtype),
        _sum_of_columns(d_h * hidden),
    )


def launch(
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    row_weights: Tensor,
    limit: float | None = None,
    *,
    num_rows: Tensor | int | None = None,
    group: LocalGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``reference`` by the compiled stage, standing alone in its kernel, on the one rank of ``group`` (a fresh
    LocalGroup if None). The tensors are bfloat16 [rows, I] and float32 [rows] on the CPU with I a multiple of 64; no
    gradients.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device or I.
    """
    device = stage_arguments.check_devices(
        d_hidden=d_hidden, gate=gate, up=up, row_weights=row_weights, num_rows=num_rows
    )
    _check(d_hidden, gate, up, row_weights, limit)
    stage_arguments.check_bfloat16(d_hidden=d_hidden, gate=gate, up=up)
    stage_arguments.check_float32("row_weights", row_weights)
    count, width = gate.shape
    stage_arguments.check_width("I of gate", width)
    num_used = count if num_rows is None else int(num_rows)
    row_block = stage_arguments.ROW_BLOCKS[0]
    segment_start = torch.tensor([0, -(-count // row_block) * row_block])
    run = stage_run.open_run(
        "swiglu_backward",
        [stage_arguments.segment_tables(segment_start, torch.tensor([count]), row_block)],
        row_block=row_block,
        num_tokens=[0],
        intermediate_size=width,
        kind="backward",
        device=device,
        group=group,
    )
    for name, tensor in (("ring_d_hidden", d_hidden), ("ring_gate", gate), ("ring_up", up)):
        run.region(0, name, width).zero_()  # padding rows
        run.fill(0, name, tensor[:num_used])
    run.floats(0, "ring_weight").zero_()
    run.floats(0, "ring_weight")[:num_used] = row_weights.detach()[:num_used]
    run.launch(swiglu_limit=limit)
    d_gate, d_up, hidden = (
        run.region(0, name, width)[:count].clone() for name in ("ring_d_gate", "ring_d_up", "ring_hidden")
    )
    partials = run.floats(0, "router_partials").view(-1, width // NUM_COLUMNS)[:count].clone()
    return d_gate, d_up, hidden, partials


def _sum_of_columns(values: Tensor) -> Tensor:
    """[rows, I] -> [rows, I/32], in the fixed tree of csrc/numeric.h: pairs, then the four that are 8 columns apart,
    then the four that are left."""
    pairs = values.view(len(values), values.shape[1] // NUM_COLUMNS, 4, 4, 2).sum(-1)
    quads = (pairs[:, :, 0] + pairs[:, :, 1]) + (pairs[:, :, 2] + pairs[:, :, 3])
    return (quads[:, :, 0] + quads[:, :, 1]) + (quads[:, :, 2] + quads[:, :, 3])


def _check(d_hidden: Tensor, gate: Tensor, up: Tensor, row_weights: Tensor, limit: float | None) -> None:
    for name, tensor in (("up", up), ("d_hidden", d_hidden)):
        if tensor.dtype != gate.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} but gate has {gate.dtype}; they must be the same")
        if tensor.shape != gate.shape or tensor.dim() != 2 or tensor.shape[1] % NUM_COLUMNS:
            raise ValueError(
                f"d_hidden, gate and up must be [rows, I] of one shape with I a multiple of {NUM_COLUMNS}, not "
                f"{tuple(d_hidden.shape)}, {tuple(gate.shape)} and {tuple(up.shape)}"
            )
    if row_weights.dtype != torch.float32 and not (gate.dtype == row_weights.dtype == torch.float64):
        raise TypeError(f"row_weights have dtype {row_weights.dtype}; they must be torch.float32")
    if row_weights.shape != (len(gate),):
        raise ValueError(f"row_weights must be [rows] = [{len(gate)}], not {tuple(row_weights.shape)}")
    if limit is not None and (math.isnan(limit) or limit < 0):
        raise ValueError(f"limit={limit} must be None or at least 0")
