"""Copies: tensors that every rank has and that must be the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.ranks.member import Member


def compare_copies(member: Member, copies: Mapping[str, Tensor | None], timeout_s: float) -> None:
    """Raises ValueError on every rank that names the tensors whose bits are not those of rank 0. Collective.

    Not compared are None, tensors on another device and other shapes: the call that follows refuses those.
    """
    if member.size() == 1:
        return
    own = torch.device(member.group.device).type
    there = {name: t for name, t in copies.items() if t is not None and t.device.type == own and t.dtype.itemsize == 2}
    numbers = torch.stack([fingerprint(tensor) for tensor in there.values()]).tolist() if there else []

    def act(ranks: list[dict[tuple[str, torch.Size], int]]) -> Sequence[Any]:
        wrong: dict[str, list[int]] = {}
        for key, number in ranks[0].items():
            found = [rank for rank, given in enumerate(ranks) if given.get(key, number) != number]
            if found:
                wrong[key[0]] = found
        if wrong:
            names = "; ".join(f"{name} on rank {', '.join(map(str, found))}" for name, found in wrong.items())
            raise ValueError(
                f"the shared expert's copies must be the same on every rank, but these differ from rank 0's: {names}. "
                "Draw them from one seed (torch.manual_seed of the same number on all ranks, then "
                "layer.reset_parameters()), load the same values, or call mok.broadcast_copies(model) on all ranks"
            )
        return [None] * len(ranks)

    payload = {(name, t.shape): number for (name, t), number in zip(there.items(), numbers, strict=True)}
    member.group.meet(member.rank(), "compare_copies", payload, act, timeout_s)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a BF16 tensor and its place, int64 []. Does not synchronise.

    A multilinear hash (Carter and Wegman, 1979): the elements times numbers that depend on the place, modulo 2^64.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    first = 0
    for part in tensor.detach().flatten().view(torch.int16).split(CHUNK):
        places = torch.arange(first, first + len(part), device=tensor.device)
        mixed = (places + 1) * -7046029254386353131  # splitmix64: its increment, and one step of its output
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        total = total + (part.long() * (mixed | 1)).sum()
        first += len(part)
    return total


CHUNK = 1 << 24
"""Elements at a time: what is computed from them is four times as large as they are."""
