"""Captured routing: what a real router chose, in a small file, so that runs and benchmarks need not invent it.

with mok.capture_routing(model, "routing.pt"):      # on every rank
    train_some_steps(model)

mok-modular run --routing routing.pt
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.shapes import MoEShape

_FORMAT = "mok_modular.routing"
_VERSIONS = (1, 2)  # 1 has no num_tokens and no shape
_MAX_EXPERTS = 32767  # ids are stored as int16


@dataclass(frozen=True, eq=False)
class Routing:
    """The choices of a router, in C captures (one per layer and step) of R ranks with at most T tokens each.

    ``expert_ids`` int32 [C, R, T, K], -1 for no route; ``router_weights`` float32 [C, R, T, K], finite;
    ``num_experts`` is E, ``source`` says in words where the capture comes from. ``num_tokens`` int32 [C, R] counts
    each rank's tokens (T everywhere if not given); what follows them is filled with -1. ``shape`` is that of the
    layer, None where it is not known.

    Raises TypeError for wrong dtypes, ValueError for wrong shapes, for ids out of range or behind the last token and
    for weights not finite.
    """

    expert_ids: Tensor
    router_weights: Tensor
    num_experts: int
    source: str
    num_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    shape: MoEShape | None = None

    def __post_init__(self) -> None:
        if self.expert_ids.dtype != torch.int32:
            raise TypeError(f"expert_ids have dtype {self.expert_ids.dtype}; they must be torch.int32")
        if self.router_weights.dtype != torch.float32:
            raise TypeError(f"router_weights have dtype {self.router_weights.dtype}; they must be torch.float32")
        if self.expert_ids.dim() != 4 or self.router_weights.shape != self.expert_ids.shape:
            raise ValueError(
                "expert_ids and router_weights must both be [C, R, T, K], not "
                f"{tuple(self.expert_ids.shape)} and {tuple(self.router_weights.shape)}"
            )
        if not 1 <= self.num_experts <= _MAX_EXPERTS:
            raise ValueError(f"num_experts={self.num_experts} must be in 1..{_MAX_EXPERTS}")
        num_wrong = int(((self.expert_ids < -1) | (self.expert_ids >= self.num_experts)).sum())
        if num_wrong:
            raise ValueError(
                f"expert_ids hold {num_wrong} ids out of range; they must be -1 (no route) "
                f"or in 0..{self.num_experts - 1}"
            )
        num_wrong = int((~self.router_weights.isfinite()).sum())
        if num_wrong:
            raise ValueError(f"router_weights hold {num_wrong} values that are not finite")
        self._check_num_tokens()
        if self.shape is not None and (self.shape.num_experts, self.shape.topk) != (
            self.num_experts,
            self.expert_ids.shape[3],
        ):
            raise ValueError(
                f"shape must have the routing's E and K, {self.num_experts} and {self.expert_ids.shape[3]}, "
                f"got {self.shape}"
            )

    def _check_num_tokens(self) -> None:
        num_captures, num_ranks, num_slots, _ = self.expert_ids.shape
        if not self.num_tokens.numel():
            full = torch.full((num_captures, num_ranks), num_slots, dtype=torch.int32)
            object.__setattr__(self, "num_tokens", full)
        if self.num_tokens.dtype != torch.int32 or self.num_tokens.shape != (num_captures, num_ranks):
            raise ValueError(
                f"num_tokens must be int32 [C, R] = [{num_captures}, {num_ranks}], got {self.num_tokens.dtype} "
                f"{list(self.num_tokens.shape)}"
            )
        if bool(((self.num_tokens < 0) | (self.num_tokens > num_slots)).any()):
            raise ValueError(f"num_tokens must be 0..{num_slots}, got {self.num_tokens.tolist()}")
        is_behind = torch.arange(num_slots) >= self.num_tokens[..., None]
        if bool((self.expert_ids[is_behind] >= 0).any()):
            raise ValueError("expert_ids must be -1 behind the last token of a rank")

    def of_rank(self, rank: int) -> tuple[Tensor, Tensor]:
        """Returns the ids and weights [tokens, K] of all tokens of a captured rank, one capture after the other."""
        is_token = torch.arange(self.expert_ids.shape[2]) < self.num_tokens[:, rank, None]
        return self.expert_ids[:, rank][is_token], self.router_weights[:, rank][is_token]

    def expert_load(self) -> Tensor:
        """Returns the number of routes of each expert in each capture, int64 [C, E]."""
        ids = self.expert_ids.flatten(1)
        return torch.stack([torch.bincount(c[c >= 0], minlength=self.num_experts) for c in ids])

    def imbalance(self) -> Tensor:
        """Returns, per capture, the busiest expert's load over the mean load, float64 [C]. NaN without any
        route."""
        load = self.expert_load().double()
        return load.amax(1) / load.mean(1)


def save_routing(path: str | os.PathLike[str], routing: Routing) -> None:
    """Writes ``routing`` to ``path``. Loading gives back the same values."""
    data = {
        "format": _FORMAT,
        "version": _VERSIONS[-1],
        # Copies: a view would be saved with the whole tensor that it is a view of.
        "expert_ids": routing.expert_ids.to(torch.int16, copy=True, memory_format=torch.contiguous_format),
        "router_weights": routing.router_weights.clone(memory_format=torch.contiguous_format),
        "num_experts": routing.num_experts,
        "source": routing.source,
        "num_tokens": routing.num_tokens.clone(memory_format=torch.contiguous_format),
        "shape": None if routing.shape is None else dataclasses.asdict(routing.shape),
    }
    torch.save(data, path)


def load_routing(path: str | os.PathLike[str] | None = None) -> Routing:
    """Reads a file that ``save_routing`` or ``capture_routing`` wrote; without ``path`` the capture that ships with
    the package.

    Raises OSError when the file cannot be read, ValueError when it is not a routing file, has another version
    or holds tensors that do not make a Routing.
    """
    if path is None:
        shipped = importlib.resources.files("mok_modular") / "data" / "routing_tiny.pt"
        with importlib.resources.as_file(shipped) as shipped_path:
            return load_routing(shipped_path)
    data = read_dict(path, "routing file", "cpu")
    if data.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a routing file; it has no format entry {_FORMAT!r}")
    if data.get("version") not in _VERSIONS:
        readable = " and ".join(map(str, _VERSIONS))
        raise ValueError(f"{path} has routing version {data.get('version')}; this library reads versions {readable}")
    try:
        shape = data.get("shape")
        return Routing(
            expert_ids=data["expert_ids"].to(torch.int32),
            router_weights=data["router_weights"],
            num_experts=data["num_experts"],
            source=data["source"],
            num_tokens=data.get("num_tokens", torch.empty(0, dtype=torch.int32)),
            shape=None if shape is None else MoEShape(**shape),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged routing file: {error}") from error


def read_dict(path: str | os.PathLike[str], what: str, device: str | None = None) -> dict[str, Any]:
    """The dict that torch.save wrote to `path`, its tensors on `device` (None: where they were).

    Raises OSError when the file cannot be read, ValueError when it is no `what`.
    """
    try:
        data = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # on foreign bytes the unpickler raises almost anything
        raise ValueError(f"{path} is not a {what}: torch.load cannot read it") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a {what}: it holds a {type(data).__name__}")
    return data
