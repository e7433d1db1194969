"""The stages of a forward as swapped functions do them: arguments out of a window, results into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mok_modular.protocol.registry import Registry
from mok_modular.swap.window import Window, check_rows, parts, store

WORK: Registry[Callable[[Callable[..., Any], Window], None]] = Registry()
"""What calls a function for a stage of a plan."""


@WORK.add("dispatch")
def _dispatch(function: Callable[..., Any], window: Window) -> None:
    swap, width = window.swap, window.swap.shared.hidden_size
    # A forward without peers publishes nothing and reads the caller's own tensor (csrc/call.h, is_input_in_place).
    is_in_place = len(swap.calls) == 1 and not window.call.is_backward
    xs = [
        call.tensors["x"] if is_in_place or call.config.wire == "mxfp8" else swap.region(r, "x", call.num_tokens, width)
        for r, call in enumerate(swap.calls)
    ]
    out = function(xs, window.tables_of_owner(), topk=swap.shared.topk)
    rows = parts(out, len(swap.calls), "dispatch", "one tensor per rank")[window.rank]
    window.store_quantized("dispatch", window.rows("ring_x", "context_x", width), rows)


@WORK.add("gate_up")
def _gate_up(function: Callable[..., Any], window: Window) -> None:
    call = window.call
    weights = (call.tensors["w_routed_gate"], call.tensors["w_routed_up"])
    x = window.rows("ring_x", "context_x", window.swap.shared.hidden_size)
    out = function(x, weights, *window.segments())
    pair = parts(out, 2, "grouped_gemm", "(gate, up) for two weights")
    for plane, rows in zip(("gate", "up"), pair, strict=True):
        to = window.rows(f"ring_{plane}", f"context_{plane}", call.intermediate_size)
        store("grouped_gemm", to, rows, window.num_rows)


@WORK.add("swiglu")
def _swiglu(function: Callable[..., Any], window: Window) -> None:
    call = window.call
    gate, up = (window.rows(f"ring_{p}", f"context_{p}", call.intermediate_size) for p in ("gate", "up"))
    out = function(gate, up, call.swiglu_limit, num_rows=window.count())
    window.store_quantized("swiglu", window.rows("ring_hidden", "", call.intermediate_size), out)


@WORK.add("down")
def _down(function: Callable[..., Any], window: Window) -> None:
    call = window.call
    hidden = window.rows("ring_hidden", "", call.intermediate_size)
    out = function(hidden, call.tensors["w_routed_down"], *window.segments())
    store("grouped_gemm", window.rows("ring_y", "", window.swap.shared.hidden_size), out, window.num_rows)


@WORK.add("combine")
def _combine(function: Callable[..., Any], window: Window) -> None:
    swap, width = window.swap, window.swap.shared.hidden_size
    own = window.rows("ring_y", "", width)
    ys = [own if r == window.rank else own[:0] for r in range(len(swap.calls))]
    tables = window.tables_of_sources()
    out = parts(function(ys, tables), len(swap.calls), "combine", "one tensor per rank")
    for src, (table, cells) in enumerate(zip(tables, out, strict=True)):
        to = swap.region(src, "combine", len(table.route_rank), width)
        check_rows("combine", cells, len(to), width)
        routed = table.route_rank >= 0
        to[routed] = cells[: len(to)][routed]


@WORK.add("reduce")
def _reduce(function: Callable[..., Any], window: Window) -> None:
    reduce_rows(function, window, window.call.tensors["router_weights"])


def reduce_rows(function: Callable[..., Any], window: Window, weights: Tensor) -> Tensor:
    """Of both passes; returns which routes there are."""
    swap, call, width = window.swap, window.call, window.swap.shared.hidden_size
    combined = swap.region(window.rank, "combine", call.num_tokens * swap.shared.topk, width)
    shared = swap.region(window.rank, "shared_y", call.num_tokens, width) if call.shared_size else None
    mask: Tensor = (call.schedule["route_rank"] >= 0).view(call.num_tokens, swap.shared.topk)
    out = function(combined, weights, mask, shared)
    store("reduce", call.tensors["output"], out, call.num_tokens)
    return mask
