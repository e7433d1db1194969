"""One layer run by any choice of options (mok_modular.testing.options), and held against the bits of a plain run.

    runs = Differential("cpu")
    print(runs.difference({**plain("host"), "mode": "split", "dispatch": "push", "windows": "all"}))    # "": none

What may change the bits picks the base: precision, limit, shared expert, routing, and for the gradients of weights,
which are sums over the rows of a rank, the number of ranks and of each one's tokens. Everything else must not change a
bit. A base is itself held against float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.shapes import MoEShape
from mok_modular.ranks.group import LocalGroup
from mok_modular.testing.checks import check_tensors
from mok_modular.testing.choice_calls import NUM_CALLS, WEIGHTS, Tensors, make_config, run_rank, start_of
from mok_modular.testing.options import ALL, Choice, Target, plain
from mok_modular.testing.workload import Workload

SHAPE = MoEShape("covering", 128, 256, num_experts=12, topk=3, shared_intermediate_size=128)
NUM_TOKENS = 200
"""Of all ranks together: several windows of 128 rows on each of them."""
_CONTEXT = ("context_", "num_rows")


class DifferenceError(AssertionError):
    """A base is not right."""


class Differential:
    """Runs of choices on one device. Groups, workspaces and bases are kept from run to run."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.target: Target = "host" if device == "cpu" else "sm_90a"
        self.groups: dict[Any, LocalGroup] = {}
        self.bases: dict[Any, list[Tensors]] = {}
        self.whole: dict[Any, Workload] = {}

    def difference(self, choice: Choice) -> str:
        """What differs from the base, or the error of the run; "" where all bits are the same."""
        try:
            wanted = self.expected(choice)
            for call, given in enumerate(self.run(choice)):
                differing = _differing(given, wanted, choice)
                if differing:
                    return f"call {call + 1} of {NUM_CALLS}: other bits in {', '.join(differing)}"
        except Exception as error:
            self.groups.clear()  # nothing that has seen a failure is used again
            return f"{type(error).__name__}: {error}"
        return ""

    def run(self, choice: Choice) -> list[list[Tensors]]:
        """What every rank has after each of NUM_CALLS calls. Raises what the library raises."""
        workload = self.workload(choice)
        config = make_config(choice, workload)
        group = self._group(choice)
        with torch.set_grad_enabled(choice["api"] == "layer" and choice["passes"] != "forward"):
            by_rank = group.run(lambda member: run_rank(member, workload, config, choice))
        return [[calls[i] for calls in by_rank] for i in range(NUM_CALLS)]

    def workload(self, choice: Choice) -> Workload:
        """The inputs of a choice: the same tokens on any number of ranks."""
        key = choice["routing"], choice["shared"]
        if key not in self.whole:
            self.whole[key] = _whole_workload(*key).to(self.device)
        whole = dataclasses.replace(self.whole[key], swiglu_limit=choice["swiglu_limit"], precision=choice["precision"])
        return spread(whole, num_tokens_of(choice["tokens"], choice["num_ranks"]))

    def expected(self, choice: Choice) -> list[Tensors]:
        """What every rank must have: of the base, with what becomes of the weights' gradients."""
        base = self._base(choice)
        main_grads = choice["main_grads"]
        if choice["passes"] == "forward":
            return [{name: t for name, t in rank.items() if not name.startswith("d_")} for rank in base]
        wanted = []
        for rank, tensors in enumerate(base):
            parts = dict(tensors)
            for i, name in enumerate(WEIGHTS):
                if (sums := parts.get(f"d_{name}")) is None:
                    continue
                if main_grads is not None:
                    sums = sums + start_of(i, rank, sums.shape, main_grads, self.device).float()
                parts[f"d_{name}"] = sums if main_grads == "fp32" else sums.bfloat16()
            wanted.append(parts)
        return wanted

    def _base(self, choice: Choice) -> list[Tensors]:
        """By rank: output, gradients (those of the weights as float32 sums) and context of a plain split run."""
        names = ("precision", "swiglu_limit", "shared", "routing", "num_ranks", "tokens")
        key = tuple(choice[name] for name in names)
        if key not in self.bases:
            base = plain(self.target) | {name: choice[name] for name in names}
            base |= {"mode": "split", "windows": ALL}
            if self.target == "host":
                base["main_grads"] = "sums"
            tensors = self.run(base)[0]
            self._check_base(base, tensors)
            self.bases[key] = tensors
        return self.bases[key]

    def _check_base(self, base: Choice, tensors: list[Tensors]) -> None:
        """Raises DifferenceError unless a base is right: on one rank by float64, on several by the base on one rank,
        bit for bit but for the gradients of weights, whose rows are added in another order."""
        names = [name for name in tensors[0] if not name.startswith(_CONTEXT)]
        if base["num_ranks"] == 1 or base["tokens"] == "nobody":
            values = {name: [_rounded(name, rank[name]).cpu() for rank in tensors] for name in names}
            checks = check_tensors(self.workload(base).to("cpu"), values)
            wrong = [f"{name}: {check}" for name, check in checks.items() if not check.is_ok]
        else:
            (alone,) = self._base({**base, "num_ranks": 1, "tokens": "even"})
            joined = {name: _join(name, [rank[name] for rank in tensors]) for name in names}
            wrong = [name for name, value in joined.items() if not _is_like(name, value, alone[name])]
        if wrong:
            raise DifferenceError(f"the base of {base} is wrong: {', '.join(wrong)}")

    def _group(self, choice: Choice) -> LocalGroup:
        names = ("num_ranks", "executor", "order", "num_workers")
        key = tuple(choice[name] for name in names)
        if key not in self.groups:
            size, executor, order, num_workers = key
            self.groups[key] = LocalGroup(
                size, device=self.device, executor=executor, order=order, num_workers=num_workers, seed=len(self.groups)
            )
        return self.groups[key]


# ---- inputs ----


def num_tokens_of(tokens: str, num_ranks: int, total: int = NUM_TOKENS) -> list[int]:
    """Tokens by rank, `total` or none in all."""
    shares = {
        "even": [1] * num_ranks,
        "uneven": ([2, 7] if num_ranks == 2 else [6, 0, 8, 1, 3, 0, 5, 2])[:num_ranks],
        "one": [0] * (num_ranks - 1) + [1],
        "nobody": [0] * num_ranks,
    }[tokens]
    if not any(shares):
        return shares
    counts = [total * share // sum(shares) for share in shares]
    counts[shares.index(max(shares))] += total - sum(counts)
    return counts


def spread(workload: Workload, num_tokens: Sequence[int]) -> Workload:
    """The first tokens of a workload of one rank on len(num_tokens) ranks, in the same order."""

    def split(parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in parts[0][: sum(num_tokens)].split(list(num_tokens))]

    return dataclasses.replace(
        workload,
        x=split(workload.x),
        expert_ids=split(workload.expert_ids),
        router_weights=split(workload.router_weights),
        d_output=split(workload.d_outputs()),
    )


def _whole_workload(routing: str, has_shared: bool) -> Workload:
    """All tokens on one rank."""
    generator = torch.Generator().manual_seed(17)
    size = (NUM_TOKENS, SHAPE.topk)
    ids = torch.randint(0, SHAPE.num_experts, size, generator=generator)
    if routing == "missing":
        ids[torch.rand(size, generator=generator) < 0.2] = -1
    elif routing == "hot":
        ids[torch.rand(size, generator=generator) < 0.7] = 5
    elif routing == "nobody":
        ids.fill_(-1)
    weights = torch.randn(size, generator=generator)
    weights[torch.rand(size, generator=generator) < 0.05] = 0.0
    shape = SHAPE if has_shared else dataclasses.replace(SHAPE, shared_intermediate_size=0)
    return Workload.from_ids(shape, [ids], [weights], seed=5)


# ---- comparisons ----


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN and the sign of zero count."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def _differing(given: Sequence[Tensors], wanted: Sequence[Tensors], choice: Choice) -> list[str]:
    """Names and ranks of the tensors that are not as wanted. A context is a part of the base's, which has all rows."""
    found = []
    for rank, (mine, base) in enumerate(zip(given, wanted, strict=True)):
        names = [name for name in base if not name.startswith(_CONTEXT)]
        if set(names) != {name for name in mine if not name.startswith(_CONTEXT)}:
            return [f"the list of tensors, which is {', '.join(mine)}, not {', '.join(names)}"]
        pairs = {name: (mine[name], base[name]) for name in names}
        if "context_x" in mine and choice["row_block"] != 256:  # rows stand elsewhere with other padding
            for name in ("x", "gate", "up"):
                part = mine[f"context_{name}"][: int(mine["num_rows"])]
                pairs[f"context_{name}"] = part, base[f"context_{name}"][: len(part)]
            for name in ("shared_gate", "shared_up"):
                pairs[f"context_{name}"] = mine[f"context_{name}"], base[f"context_{name}"]
        found += [f"{name} of rank {rank}" for name, (a, b) in pairs.items() if not same_bits(a, b)]
    return found


def _is_weight(name: str) -> bool:
    return name.removeprefix("d_") in WEIGHTS


def _rounded(name: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if _is_weight(name) else tensor


def _join(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The tensors of all ranks as one rank would have them."""
    return torch.stack(list(parts)).sum(0) if name.startswith("d_shared") else torch.cat(list(parts))


def _is_like(name: str, value: Tensor, alone: Tensor) -> bool:
    """The same bits; of float32 sums, the same up to the order of the additions."""
    if not _is_weight(name):
        return same_bits(value, alone)
    return bool((value - alone).norm() <= 1e-5 * alone.norm())
