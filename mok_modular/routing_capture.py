"""Capture of routing: keeps what the routers of a module's MoE layers choose, as a Routing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mok_modular.layer import MoE, moe_layers
from mok_modular.protocol.shapes import MoEShape
from mok_modular.routing import Routing, save_routing


class RoutingCapture:
    """What `capture_routing` keeps: `routing` is the Routing once the block has ended, on every rank."""

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.choices: list[tuple[Tensor, Tensor]] = []

    def record(self, expert_ids: Tensor, router_weights: Tensor) -> None:
        """Keeps one forward's ids [T, K] and weights [T, K] of this rank."""
        ids = expert_ids.detach().to("cpu", torch.int32, copy=True)
        weights = router_weights.detach().to("cpu", torch.float32, copy=True)
        self.choices.append((ids, weights.masked_fill_(ids < 0, 0)))  # the weight of a missing route may be anything


@contextmanager
def capture_routing(
    module: torch.nn.Module, path: str | os.PathLike[str] | None = None, *, source: str | None = None
) -> Iterator[RoutingCapture]:
    """Captures what the MoE layers of `module` (a model, or one layer) are given to route by, as long as the block
    lasts: ids and weights of every forward, how many tokens each rank had, and the layer's sizes. Collective: every
    rank of the group enters and leaves. At the end the ranks put their parts together, one capture a forward in the
    order of the calls; rank 0 writes them to `path`, if there is one, for `load_routing` and `mok-modular --routing`.
    Forwards that a checkpoint repeats are not kept twice. `source`: where it comes from, in words.

    Raises ValueError when the module holds no MoE layer, layers of several groups or with different E and K, and when
    nothing was called; OSError where the file cannot be written.
    """
    layers = _moe_layers(module)
    capture = RoutingCapture()
    for layer in layers:
        layer.recorders.append(capture.record)
    try:
        yield capture
    finally:
        for layer in layers:
            layer.recorders.remove(capture.record)
    member, shapes = layers[0].member, [layer.shape for layer in layers]
    shape = shapes[0] if len({dataclasses.astuple(shape)[1:] for shape in shapes}) == 1 else None
    words = source or f"{len(layers)} MoE layers of a {type(module).__name__}"

    def act(parts: list[Any]) -> Sequence[Any]:
        return [_join(parts, shapes[0].num_experts, words, shape)] * len(parts)

    timeout_s = layers[0].config.start_timeout_s
    capture.routing = member.group.meet(member.rank(), "capture_routing", capture.choices, act, timeout_s)
    if path is not None and member.rank() == 0:
        assert capture.routing is not None
        save_routing(path, capture.routing)


def _moe_layers(module: torch.nn.Module) -> list[MoE]:
    layers = moe_layers(module)
    sizes = sorted({(layer.num_experts, layer.topk) for layer in layers})
    if len(sizes) > 1:
        raise ValueError(f"module must hold MoE layers with one E and K, got (E, K) of {', '.join(map(str, sizes))}")
    return layers


def _join(
    parts: Sequence[Sequence[tuple[Tensor, Tensor]]], num_experts: int, source: str, shape: MoEShape | None
) -> Routing:
    """Every rank's forwards, filled up to the largest number of tokens."""
    counts = [len(part) for part in parts]
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(f"capture_routing: every rank must call the same layers, once at least; calls: {counts}")
    num_tokens = torch.tensor([[len(ids) for ids, _ in call] for call in zip(*parts, strict=True)], dtype=torch.int32)
    size = (counts[0], len(parts), int(num_tokens.max()), parts[0][0][0].shape[1])
    all_ids, all_weights = torch.full(size, -1, dtype=torch.int32), torch.zeros(size)
    for rank, part in enumerate(parts):
        for call, (ids, weights) in enumerate(part):
            all_ids[call, rank, : len(ids)] = ids
            all_weights[call, rank, : len(ids)] = weights
    return Routing(all_ids, all_weights, num_experts, source, num_tokens, shape)
