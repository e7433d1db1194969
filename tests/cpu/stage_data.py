"""Inputs of the stage tests: values that say where they come from, routings of every kind, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import torch
from torch import Tensor

from mok_modular import LocalGroup

HIDDEN_SIZES = (64, 192, 768, 2880)
INTERMEDIATE_SIZES = (64, 640)
TOPKS = (1, 2, 6, 8, 10, 22)
KINDS = ("any", "missing", "one expert", "one rank", "same expert twice")


def identified(origin: int, num_rows: int, width: int) -> Tensor:
    """Rows that say who they are: bfloat16 [num_rows, width] of normal numbers by (origin, row, column)."""
    row, column = torch.arange(num_rows)[:, None], torch.arange(width)
    code = (origin * 7919 + row * 1009 + column) % 32000
    return (code + 0x80).to(torch.int16).view(torch.bfloat16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bits: NaN equals itself, -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Routing:
    """Ids by rank, and what they were made of."""

    num_experts: int
    topk: int
    ids: list[Tensor] = field(repr=False)
    kind: str = ""


def routing(num_tokens: Sequence[int], num_experts: int, topk: int, kind: str = "any", seed: int = 0) -> Routing:
    """One of KINDS; every other rank has int64 ids."""
    generator = torch.Generator().manual_seed(seed)
    num_ranks = len(num_tokens)
    num_local_experts = num_experts // num_ranks
    low, high = (-1 if kind == "missing" else 0), num_experts
    hot = int(torch.randint(0, num_experts, (1,), generator=generator))
    if kind == "one rank":
        low = hot // num_local_experts * num_local_experts
        high = low + num_local_experts
    ids = []
    for rank, count in enumerate(num_tokens):
        rank_ids = torch.randint(low, high, (count, topk), generator=generator)
        if kind == "missing":
            rank_ids[::3] = -1  # tokens with no route at all
        if kind == "one expert":
            rank_ids.fill_(hot)
        if kind == "same expert twice":
            rank_ids[:, -1] = rank_ids[:, 0]
        ids.append(rank_ids.to(torch.int64 if rank % 2 else torch.int32))
    return Routing(num_experts, topk, ids, kind)


@st.composite
def routings(
    draw: st.DrawFn, max_tokens: int = 70, max_local_experts: int = 6, topks: Sequence[int] = TOPKS
) -> Routing:
    """Routings over 1, 2 or 4 ranks with numbers of tokens of their own, often 0."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    num_tokens = draw(
        st.lists(st.just(0) | st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks), label="num_tokens"
    )
    num_experts = num_ranks * draw(st.integers(1, max_local_experts), label="num_local_experts")
    topk, kind = draw(st.sampled_from(topks)), draw(st.sampled_from(KINDS))
    return routing(num_tokens, num_experts, topk, kind, seed=draw(st.integers(0, 999)))


@st.composite
def groups(draw: st.DrawFn, size: int) -> LocalGroup:
    """A group whose workers come in some order and number."""
    order = draw(st.sampled_from(["round_robin", "random", "last_first"]))
    return LocalGroup(size, order=order, seed=draw(st.integers(0, 99)), num_workers=draw(st.integers(1, 7)))


@st.composite
def segments(draw: st.DrawFn, row_block: int, max_experts: int = 5, max_blocks: int = 2) -> tuple[Tensor, Tensor]:
    """segment_start and segment_num_rows (int32) of some local experts; empty, full and partial segments."""
    num_rows = draw(
        st.lists(
            st.sampled_from([0, 1, row_block, row_block * max_blocks]) | st.integers(0, row_block * max_blocks),
            min_size=1,
            max_size=max_experts,
        ),
        label="segment_num_rows",
    )
    counts = torch.tensor(num_rows, dtype=torch.int32)
    starts = torch.nn.functional.pad(((counts + row_block - 1) // row_block * row_block).cumsum(0), (1, 0))
    return starts.to(torch.int32), counts


def filled(segment_start: Tensor, segment_num_rows: Tensor, num_rows: int) -> Tensor:
    """Which of the rows are no padding, bool [num_rows]."""
    mask = torch.zeros(num_rows, dtype=torch.bool)
    for start, count in zip(segment_start.tolist(), segment_num_rows.tolist(), strict=False):
        mask[start : start + count] = True
    return mask
