"""Dispatch: the owner of an expert reads the tokens routed to it from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(xs: Sequence[Tensor], peer_rank: Tensor, peer_token_idx: Tensor, *, topk: int) -> Tensor:
    """Returns the rows [num_rows, H] of one owner, in the dtype of ``xs``.

    ``xs`` holds every rank's tokens [T_r, H]; ``peer_rank`` and ``peer_token_idx`` (int32 [num_rows]) are the
    owner's tables from the schedule. Row i is token ``peer_token_idx[i] // topk`` of rank ``peer_rank[i]``; a
    padding row (peer_rank -1) is zero. Differentiable: a token's gradient is the sum over its rows, for
    bfloat16 in float32 and rounded once; padding rows give none.

    Raises ValueError for wrong shapes and for a table entry that names no token.
    """
    if not xs or any(x.dim() != 2 or x.shape[1] != xs[0].shape[-1] for x in xs):
        raise ValueError(f"xs must hold [T, H] with one H on all ranks, not {[tuple(x.shape) for x in xs]}")
    if peer_rank.dim() != 1 or peer_rank.shape != peer_token_idx.shape:
        raise ValueError(
            f"peer_rank and peer_token_idx must both be [num_rows], not {tuple(peer_rank.shape)} "
            f"and {tuple(peer_token_idx.shape)}"
        )
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    num_tokens = torch.tensor([len(x) for x in xs], device=peer_rank.device)
    first_token = num_tokens.cumsum(0) - num_tokens

    filled = (peer_rank >= 0).nonzero().squeeze(1)
    src_rank, token = peer_rank[filled].long(), peer_token_idx[filled].long() // topk
    if bool((src_rank >= len(xs)).any()) or bool((token < 0).any()) or bool((token >= num_tokens[src_rank]).any()):
        raise ValueError(f"peer_rank and peer_token_idx name tokens beyond xs, whose ranks hold {num_tokens.tolist()}")
    tokens = torch.cat(list(xs))
    if tokens.dtype == torch.bfloat16:
        tokens = tokens.float()  # so that backward sums in float32
    rows = tokens.index_select(0, first_token[src_rank] + token).to(xs[0].dtype)
    return rows.new_zeros(len(peer_rank), rows.shape[1]).index_copy(0, filled, rows)
