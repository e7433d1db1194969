"""Counts, experts and sizes that forward and backward are tried with: numbers of tokens by rank, and options of
make_workload."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def all_to(*experts: int) -> Any:
    """Every route to one of these experts, in turn."""

    def routing(rank: int, count: int, generator: torch.Generator) -> Tensor:
        order = torch.arange(count * 2).reshape(count, 2)
        return torch.tensor(experts)[order % len(experts)]

    return routing


def hot(rank: int, count: int, generator: torch.Generator) -> Tensor:
    """Nine routes in ten to experts 1, 4 and 6, which live on different ranks of four."""
    ids = torch.randint(0, 8, (count, 2), generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.9, torch.tensor([1, 4, 6])[ids % 3], ids)


def missing(rank: int, count: int, generator: torch.Generator) -> Tensor:
    """-1 anywhere; every third token has no route at all."""
    ids = torch.randint(-1, 8, (count, 2), generator=generator)
    ids[::3] = -1
    return ids


def nobody(rank: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.full((count, 2), -1)


def twice(rank: int, count: int, generator: torch.Generator) -> Tensor:
    """The same expert twice in every token's top-k."""
    return torch.randint(0, 8, (count, 1), generator=generator).expand(count, 2).contiguous()


CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([60, 60, 60, 60], {}),
    "no shared expert": ([60, 60], {"S": 0}),
    "one token in all": ([0, 1, 0, 0], {}),
    "no tokens on some ranks": ([0, 70, 0, 33], {}),
    "no tokens anywhere": ([0, 0, 0, 0], {}),
    "no tokens anywhere, no shared expert": ([0, 0], {"S": 0}),
    "4095 tokens": ([4095], {}),
    "672 tokens": ([672, 1], {}),
    "5 against 5000": ([5, 5000], {}),
    "all to one expert": ([50, 200, 0, 90], {"routing": all_to(5)}),
    "all to one rank": ([50, 200, 0, 90], {"routing": all_to(2, 3)}),
    "hot experts on several ranks": ([150, 150, 150, 150], {"routing": hot}),
    "missing routes": ([100, 30], {"routing": missing}),
    "missing routes, no shared expert": ([100, 30], {"routing": missing, "S": 0}),
    "no routes at all": ([40, 9], {"routing": nobody}),
    "no routes at all, no shared expert": ([40, 9], {"routing": nobody, "S": 0}),
    "an expert twice in a token": ([77, 5], {"routing": twice}),
    "24 experts a rank": ([90, 31], {"E": 48}),
    "512 experts": ([120, 80, 1, 0], {"E": 512, "K": 10, "I": 64}),
    "one expert a rank": ([33, 34, 35, 36, 37, 38, 39, 40], {}),
    "16 ranks": ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], {"E": 32}),
    "K 1": ([66, 5], {"K": 1}),
    "K 6": ([66, 5], {"K": 6}),
    "K 8": ([66, 5], {"K": 8}),
    "K 22": ([66, 5], {"K": 22}),
    "H 2880, I 640": ([7, 12], {"H": 2880, "I": 640}),
    "H 768": ([70, 9], {"H": 768}),
    "H 8192": ([3, 5], {"H": 8192, "E": 2}),
    "limit 0": ([50, 50], {"swiglu_limit": 0.0}),
    "limit 0.5": ([50, 50], {"swiglu_limit": 0.5}),
    "limit 7, no shared expert": ([50, 50], {"swiglu_limit": 7.0, "S": 0}),
}
