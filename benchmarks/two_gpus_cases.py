"""Layers, routings and floors of `bars.py two_gpus`: plain arithmetic, no GPU.

A row is one (token, k) pair at its expert. `rows[a][b]` counts the rows of rank a's tokens at rank b's experts, and
`unique[a][b]` the tokens of rank a with at least one expert on rank b.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_modular import PRESETS, MoEShape
from mok_modular.routing import load_routing

NUM_RANKS = 2
EP = 64
ROUTINGS = ("uniform", "captured", "remote", "hot")
CAPTURE = 3


def two_rank_layer(shape: MoEShape) -> MoEShape:
    """A preset as two ranks of EP64 see it: twice the experts of one of its ranks, but at least 2K, so that a token has
    K experts to choose from on the other rank; no shared expert."""
    num_experts = max(NUM_RANKS * shape.num_experts // EP, 2 * shape.topk)
    return MoEShape(shape.name, shape.hidden_size, shape.intermediate_size, num_experts, shape.topk)


LAYERS = {name: two_rank_layer(shape) for name, shape in PRESETS.items() if name != "tiny"}


def minibatch_size(layer: MoEShape) -> int:
    """Rows of a window in which gate_up has about four tiles of 128 rows and 128 columns for each of 132 SMs, 4096 at
    least: 8192 where experts are 1024 wide (docs/performance.md)."""
    rows = 4 * 132 * 128 * 128 / layer.intermediate_size
    return max(4096, 1 << round(math.log2(rows)))


def captured_popularity(num_experts: int) -> Tensor:
    """How often each of `num_experts` experts is chosen, relative to the mean, after the capture that ships with the
    package: expert e takes the share of captured expert floor(e * 16 / num_experts)."""
    load = load_routing().expert_load()[CAPTURE].double()
    popularity = load[torch.arange(num_experts) * len(load) // num_experts]
    return popularity / popularity.mean()


def expert_ids(layer: MoEShape, num_tokens: int, routing: str, rank: int, num_ranks: int = NUM_RANKS) -> Tensor:
    """What the router of `rank` chose, int64 [T, K], K distinct experts a token; the same on whichever rank asks.

    uniform: any experts. captured: drawn without replacement by `captured_popularity`. remote: never an expert of the
    own rank. hot: only experts of rank 0.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    seed = zlib.crc32(f"{layer.name} {num_tokens} {routing} {rank}".encode())
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_tokens, layer.num_experts, generator=generator, dtype=torch.float64)
    scores = -(-uniform.clamp(1e-12, 1 - 1e-12).log()).log()  # Gumbel: the K largest are drawn without replacement
    owner = torch.arange(layer.num_experts) // (layer.num_experts // num_ranks)
    if routing == "captured":
        scores += captured_popularity(layer.num_experts).clamp(min=1e-6).log()
    elif routing == "remote":
        scores[:, owner == rank] = -torch.inf
    elif routing == "hot":
        scores[:, owner != 0] = -torch.inf
    values, ids = scores.topk(layer.topk, dim=1)
    if num_tokens and not bool(values.isfinite().all()):
        raise ValueError(f"{routing}: {layer.name} has fewer than {layer.topk} experts to choose from")
    return ids


@dataclass(frozen=True)
class Load:
    """Where the tokens of all ranks go."""

    rows: tuple[tuple[int, ...], ...]
    unique: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, ids_by_rank: Sequence[Tensor], num_experts: int) -> Load:
        num_ranks = len(ids_by_rank)
        rows, unique = [], []
        for ids in ids_by_rank:
            owner = ids // (num_experts // num_ranks)
            is_there = [owner == rank for rank in range(num_ranks)]
            rows.append(tuple(int(each.sum()) for each in is_there))
            unique.append(tuple(int(each.any(dim=1).sum()) for each in is_there))
        return cls(tuple(rows), tuple(unique))

    def received(self, rank: int) -> int:
        """Rows at the experts of a rank."""
        return sum(row[rank] for row in self.rows)

    def max_received(self) -> int:
        return max(self.received(rank) for rank in range(len(self.rows)))


def crossing(matrix: Sequence[Sequence[int]]) -> int:
    """What crosses a link in one direction when `matrix` is sent once: the largest of all ranks' out and in."""
    ranks = range(len(matrix))
    out = [sum(matrix[a][b] for b in ranks if b != a) for a in ranks]
    into = [sum(matrix[a][b] for a in ranks if a != b) for b in ranks]
    return max(*out, *into)


def crossing_there_and_back(matrix: Sequence[Sequence[int]]) -> int:
    """The same for dispatch and combine of one forward: what goes out comes back, so both directions carry both."""
    ranks = range(len(matrix))
    return max(sum(matrix[a][b] + matrix[b][a] for b in ranks if b != a) for a in ranks)


def floors_ms(layer: MoEShape, load: Load, dense_flops: float, link_bytes_per_s: float) -> dict[str, float]:
    """What one forward cannot be faster than, in milliseconds.

    flop: the products of the busiest rank at the dense rate. link: dispatch and combine of every row that crosses, at
    the rate of a plain copy with both directions busy. link_unique: the same if a token crossed once a rank.
    """
    row_bytes = 2 * layer.hidden_size
    flops = 6 * load.max_received() * layer.hidden_size * layer.intermediate_size
    return {
        "flop": flops / dense_flops * 1e3,
        "link": crossing_there_and_back(load.rows) * row_bytes / link_bytes_per_s * 1e3,
        "link_unique": crossing_there_and_back(load.unique) * row_bytes / link_bytes_per_s * 1e3,
    }
