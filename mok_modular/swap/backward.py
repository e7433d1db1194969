"""The stages of a backward as swapped functions do them: arguments out of a window, results into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.registry import Registry
from mok_modular.protocol.sizes import NUM_COLUMNS
from mok_modular.swap.forward import reduce_rows
from mok_modular.swap.window import Window, check_rows, describe, parts, store

WORK: Registry[Callable[[Callable[..., Any], Window], None]] = Registry()
"""What calls a function for a stage of a plan."""


@WORK.add("reverse_combine")
def _reverse_combine(function: Callable[..., Any], window: Window) -> None:
    swap, width, topk = window.swap, window.swap.shared.hidden_size, window.swap.shared.topk
    d_outputs = [
        call.tensors["d_output"] if call.config.wire == "mxfp8" else swap.region(r, "d_output", call.num_tokens, width)
        for r, call in enumerate(swap.calls)
    ]
    weights = [
        swap.region(r, "router_weights", call.num_tokens, topk, torch.float32) for r, call in enumerate(swap.calls)
    ]
    out = function(d_outputs, weights, window.tables_of_owner(), topk=topk)
    mine = parts(out, len(swap.calls), "reverse_combine", "one pair per rank")[window.rank]
    d_y, row_weights = parts(mine, 2, "reverse_combine", "(d_y, weights of the rows) for a rank")
    window.store_quantized("reverse_combine", window.rows("ring_d_y", "saved_d_y", width), d_y)
    _store_vector("reverse_combine: weights of the rows", window.floats("ring_weight", 1), row_weights, window)


@WORK.add("down_dgrad")
def _down_dgrad(function: Callable[..., Any], window: Window) -> None:
    d_y = window.rows("ring_d_y", "saved_d_y", window.swap.shared.hidden_size)
    out = function(d_y, window.call.tensors["w_routed_down"], *window.segments())
    d_hidden = window.rows("ring_d_hidden", "", window.call.intermediate_size)
    store("grouped_dgrad", d_hidden, out, window.num_rows)


@WORK.add("swiglu_backward")
def _swiglu_backward(function: Callable[..., Any], window: Window) -> None:
    call, width = window.call, window.call.intermediate_size
    d_hidden = window.rows("ring_d_hidden", "", width)
    gate, up = (window.rows(f"ring_{p}", f"context_{p}", width) for p in ("gate", "up"))
    weights = window.floats("ring_weight", 1)[:, 0]
    out = function(d_hidden, gate, up, weights, call.swiglu_limit, num_rows=window.count())
    name = "swiglu_backward"
    d_gate, d_up, hidden, partials = parts(out, 4, name, "(d_gate, d_up, weighted_hidden, d_router)")
    window.store_quantized(f"{name}: d_gate", window.rows("ring_d_gate", "saved_d_gate", width), d_gate)
    window.store_quantized(f"{name}: d_up", window.rows("ring_d_up", "saved_d_up", width), d_up)
    to = window.rows("ring_hidden", "saved_hidden", width)
    store(f"{name}: weighted_hidden", to, hidden, window.num_rows)
    store(f"{name}: d_router", window.floats("router_partials", width // NUM_COLUMNS), partials, window.num_rows)


@WORK.add("gate_up_dgrad")
def _gate_up_dgrad(function: Callable[..., Any], window: Window) -> None:
    tensors, width = window.call.tensors, window.call.intermediate_size
    rows = tuple(window.rows(f"ring_{name}", f"saved_{name}", width) for name in ("d_gate", "d_up"))
    # Where they were quantized along another axis than for the forward, they have names of their own.
    weights = tuple(tensors.get(f"w_dgrad_{name}", tensors[f"w_routed_{name}"]) for name in ("gate", "up"))
    out = function(rows, weights, *window.segments())
    store("grouped_dgrad", window.rows("ring_y", "", window.swap.shared.hidden_size), out, window.num_rows)


@WORK.add("reverse_dispatch")
def _reverse_dispatch(function: Callable[..., Any], window: Window) -> None:
    swap, width = window.swap, window.swap.shared.hidden_size
    own = window.rows("ring_y", "", width)
    own_partials = window.floats("router_partials", window.call.intermediate_size // NUM_COLUMNS)
    is_mine = [r == window.rank for r in range(len(swap.calls))]
    d_xs = [own if mine else own[:0] for mine in is_mine]
    partials = [own_partials if mine else own_partials[:0] for mine in is_mine]
    tables = window.tables_of_sources()
    out = parts(function(d_xs, partials, tables), len(swap.calls), "reverse_dispatch", "one pair per rank")
    for src, (table, pair) in enumerate(zip(tables, out, strict=True)):
        d_x, d_router = parts(pair, 2, "reverse_dispatch", "(d_x cells, d_router cells) for a rank")
        count, routed = len(table.route_rank), table.route_rank >= 0
        check_rows("reverse_dispatch: d_x cells", d_x, count, width)
        swap.region(src, "combine", count, width)[routed] = d_x[:count][routed]
        _check_vector("reverse_dispatch: d_router cells", d_router, count)
        swap.region(src, "d_router", count, 1, torch.float32)[routed, 0] = d_router[:count][routed]


@WORK.add("wgrad")
def _wgrad(function: Callable[..., Any], window: Window) -> None:
    """Three calls, of gate, up and down. An expert whose rows go on in the next macrobatch is carried there; the others
    are complete."""
    call, hidden_size, width = window.call, window.swap.shared.hidden_size, window.call.intermediate_size
    x = _operand(window, "ring_x", "ring_x", "context_x", hidden_size)
    d_y = _operand(window, "ring_d_y", "ring_d_y", "saved_d_y", hidden_size)
    d_gate = _operand(window, "ring_d_gate", "ring_gate", "saved_d_gate", width)
    d_up = _operand(window, "ring_d_up", "ring_up", "saved_d_up", width)
    hidden = _operand(window, "ring_hidden", "ring_hidden", "saved_hidden", width)
    start, counts = window.segments()
    end = call.schedule["segment_start"][1:] - window.first_row
    total = call.schedule["segment_num_rows"]
    for weight, left, right in (("gate", d_gate, x), ("up", d_up, x), ("down", d_y, hidden)):
        out = call.tensors[f"d_routed_{weight}"]
        if window.macrobatch == 0 and not _is_added(call.tensors):
            out[total == 0] = 0
        if window.num_rows == 0:
            continue
        carry = None
        if (window.rank, weight) in window.swap.carries:
            expert, sums = window.swap.carries.pop((window.rank, weight))
            carry = sums.new_zeros(out.shape)
            carry[expert] = sums
        sums = function(left, right, start, counts, carry)
        if not isinstance(sums, Tensor) or sums.dtype != torch.float32 or sums.shape != out.shape:
            raise ValueError(
                f"wgrad must return the float32 sums of every local expert, [El, M, N] = {list(out.shape)} for the "
                f"{weight} weight, got {describe(sums)}"
            )
        for expert in counts.nonzero().flatten().tolist():
            if int(end[expert]) > window.num_rows:
                window.swap.carries[window.rank, weight] = expert, sums[expert].clone()
            else:
                _finish(call.tensors, out[expert], sums[expert])


def _operand(window: Window, region: str, columnwise: str, kept: str, width: int) -> Tensor:
    """What a weight gradient multiplies; in MXFP8 the values after quantization along the rows, which quantize has left
    in the ring (csrc/stages/quantize.h says where)."""
    return window.rows(columnwise, "", width) if window.call.is_mxfp8 else window.rows(region, kept, width)


def _is_added(tensors: Any) -> bool:
    return any(name.startswith("gradients_") for name in tensors)


def _finish(tensors: Any, out: Tensor, sums: Tensor) -> None:
    """One rounding into a tensor of its own, or one addition to main_grads."""
    out.copy_(out.float() + sums if _is_added(tensors) else sums)


@WORK.add("reduce")
def _reduce(function: Callable[..., Any], window: Window) -> None:
    call, topk = window.call, window.swap.shared.topk
    mask = reduce_rows(function, window, torch.ones(call.num_tokens, topk))
    d_router = window.swap.region(window.rank, "d_router", call.num_tokens, topk, torch.float32)
    call.tensors["d_router"].copy_(d_router.where(mask, 0))


def _store_vector(name: str, to: Tensor, value: Any, window: Window) -> None:
    _check_vector(name, value, window.num_rows)
    to[: window.num_rows, 0] = value[: window.num_rows]


def _check_vector(name: str, value: Any, count: int) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 1 or len(value) < count:
        raise ValueError(f"{name} must be float32 of at least [{count}], got {describe(value)}")
