"""What the cases of a stage's contract are made of: arguments, exact results, and the segments and routes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_modular.stages import schedule

ROW_BLOCK = 128


@dataclass(frozen=True)
class Finding:
    """A rule in one case: whether it was kept, and what was seen if not."""

    rule: str
    case: str
    is_ok: bool
    detail: str = ""


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one call, the exact results, and which of their rows (first dimension) count.

    `slack` is what float32 sums may add to half a unit in the last place; None: bits must agree.
    `scale` is the sum of absolute values that a sum is made of: an error that is small beside it comes from rounding,
    and breaks `rule`; a large one breaks `large_rule`.
    `empty`: rows that must be the exact result to the last bit, whatever the others may do.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: list[Tensor]
    used: list[Tensor]
    slack: Sequence[Tensor | None] | None = None
    scale: list[Tensor] | None = None
    rule: str = "values"
    large_rule: str = "values"
    is_padding_checked: bool = False
    dtypes: Sequence[torch.dtype] = ()  # of the results; none: all bfloat16
    rules: Sequence[str] = ()  # by result; none: `rule`
    empty: list[Tensor] = field(default_factory=list)

    def dtype(self, i: int) -> torch.dtype:
        """Of a result."""
        return self.dtypes[i] if self.dtypes else torch.bfloat16


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def count_of(num_rows: int) -> Tensor:
    """A number of rows as functions get it."""
    return torch.tensor(num_rows, dtype=torch.int32)


def segments(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(counts, dtype=torch.int32)
    padded = (rows + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0)).int(), rows


def filled(start: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    used = torch.zeros(num_rows, dtype=torch.bool)
    for first, count in zip(start.tolist(), counts.tolist(), strict=False):
        used[first : first + count] = True
    return used


SEGMENTS = {
    "one row": [1],
    "empty segments": [0, 5, 0],
    "hot segment": [0, 300, 3],
    "full segments": [128, 256],
    "no rows": [0, 0],
}


def route_cases() -> Iterator[tuple[str, list[int], int, list[Any]]]:
    def ids(kind: str, count: int, topk: int, num_experts: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        out = torch.randint(-1, num_experts, (count, topk), generator=generator)
        if kind == "hot segment":
            out.fill_(1)
        if kind == "no rows":
            out.fill_(-1)
        return out.int()

    for kind, tokens, topk in (
        ("random routes", [70, 33], 3),
        ("hot segment", [90, 61], 2),
        ("a rank without tokens", [0, 50], 2),
        ("no rows", [4, 3], 2),
    ):
        rank_ids = [ids(kind, count, topk, 4, seed) for seed, count in enumerate(tokens)]
        yield kind, tokens, topk, list(schedule.reference(rank_ids, num_experts=4, row_block=ROW_BLOCK))


def compare(case: str, a: Tensor, b: Tensor) -> Finding:
    is_same = same_bits(a, b)
    return Finding("order", case, is_same, "" if is_same else "the same row has other bits in another place")


def no_order(_: Callable[..., Any]) -> Iterator[Finding]:
    """Copies: that bits agree says it all."""
    return iter(())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bits: NaN equals itself, -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
