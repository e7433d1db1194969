"""Checks of the layer's arguments, as tensors of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def check(
    xs: Sequence[Tensor],
    expert_ids: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    routed: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """That the arguments fit together; the stages check the dtypes and values that are theirs."""
    if not len(xs) == len(expert_ids) == len(router_weights) > 0:
        raise ValueError(
            "xs, expert_ids and router_weights must have one entry per rank, not "
            f"{len(xs)}, {len(expert_ids)} and {len(router_weights)}"
        )
    for rank, (x, ids, weights) in enumerate(zip(xs, expert_ids, router_weights, strict=True)):
        if x.dtype not in _DTYPES:
            raise TypeError(f"x of rank {rank} has dtype {x.dtype}; it must be one of {', '.join(map(str, _DTYPES))}")
        if x.dim() != 2 or ids.dim() != 2 or ids.shape[1] < 1 or len(ids) != len(x) or weights.shape != ids.shape:
            raise ValueError(
                f"on rank {rank} x must be [T, H], expert_ids and router_weights [T, K] with the same T and "
                f"K >= 1, not {tuple(x.shape)}, {tuple(ids.shape)} and {tuple(weights.shape)}"
            )
    if len({(x.dtype, x.shape[1]) for x in xs}) > 1:
        raise ValueError(f"x must have one dtype and H on all ranks, not {[(x.dtype, x.shape[1]) for x in xs]}")
    dtype, hidden_size = xs[0].dtype, xs[0].shape[1]
    gate, _, down = routed
    if gate.dim() != 3 or down.dim() != 3:
        raise ValueError(f"routed weights must have three dimensions, not {[tuple(w.shape) for w in routed]}")
    num_experts, intermediate_size = gate.shape[:2]
    w_in, w_out = (num_experts, intermediate_size, hidden_size), (num_experts, hidden_size, intermediate_size)
    _check_weights("routed", routed, (w_in, w_in, w_out), dtype)
    given = [w for w in shared if w is not None]
    if len(given) not in (0, 3):
        raise ValueError(f"shared weights must be all three or none, not {len(given)} of them")
    if given:
        shared_size = len(given[0])
        w_in_shared = (shared_size, hidden_size)
        _check_weights("shared", given, (w_in_shared, w_in_shared, (hidden_size, shared_size)), dtype)


def _check_weights(kind: str, weights: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    for name, weight, shape in zip(("gate", "up", "down"), weights, shapes, strict=True):
        if weight.dtype != dtype:
            raise TypeError(f"w_{kind}_{name} has dtype {weight.dtype}; it must have that of x, {dtype}")
        if tuple(weight.shape) != shape:
            raise ValueError(f"w_{kind}_{name} must be {list(shape)}, not {list(weight.shape)}")
