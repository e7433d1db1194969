"""Combine: the experts' output rows return to the ranks that their tokens came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(ys: Sequence[Tensor], route_rank: Tensor, route_row: Tensor) -> Tensor:
    """Returns the rows [T*K, H] that arrive at one source rank, in the dtype of ``ys``.

    ``ys`` holds every rank's expert outputs [num_rows_r, H]; ``route_rank`` and ``route_row`` (int32 [T*K])
    are the source's tables from the schedule. Cell ``token*K + k`` is row ``route_row`` of rank
    ``route_rank``; the cell of a missing route (route_rank -1) is zero here; the library leaves it
    unwritten. Differentiable.

    Raises ValueError for wrong shapes and for a table entry that names no row.
    """
    if not ys or any(y.dim() != 2 or y.shape[1] != ys[0].shape[-1] for y in ys):
        raise ValueError(f"ys must hold [num_rows, H] with one H on all ranks, not {[tuple(y.shape) for y in ys]}")
    if route_rank.dim() != 1 or route_rank.shape != route_row.shape:
        raise ValueError(
            f"route_rank and route_row must both be [T*K], not {tuple(route_rank.shape)} and {tuple(route_row.shape)}"
        )
    num_rows = torch.tensor([len(y) for y in ys], device=route_rank.device)
    first_row = num_rows.cumsum(0) - num_rows

    routed = (route_rank >= 0).nonzero().squeeze(1)
    dst_rank, row = route_rank[routed].long(), route_row[routed].long()
    if bool((dst_rank >= len(ys)).any()) or bool((row < 0).any()) or bool((row >= num_rows[dst_rank]).any()):
        raise ValueError(f"route_rank and route_row name rows beyond ys, whose ranks hold {num_rows.tolist()}")
    combined = ys[0].new_zeros(len(route_rank), ys[0].shape[1])
    return combined.index_copy(0, routed, torch.cat(list(ys)).index_select(0, first_row[dst_rank] + row))
