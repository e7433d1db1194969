"""One layer's inputs on every rank, and what torch makes of them; runs.py runs them.

    workload = Workload.from_routing(load_routing(), shape, num_ranks=4, num_tokens=256)

Values come from seeded generators, one per rank (x) and per expert (weights): expert 5 has the same weights
whatever the number of ranks, and rank 1 the same x whatever the number of tokens of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok_modular import reference
from mok_modular.protocol.shapes import MoEShape
from mok_modular.routing import Routing


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights in bfloat16. routed_gate and routed_up [E, I, H], routed_down [E, H, I]; shared_gate and
    shared_up [S, H], shared_down [H, S], None without a shared expert."""

    routed_gate: Tensor
    routed_up: Tensor
    routed_down: Tensor
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None

    @classmethod
    def random(cls, shape: MoEShape, seed: int, device: torch.device | str = "cpu") -> Weights:
        """Normal weights, scaled so that gate, up and down have outputs of about unit size. Made where they are to
        stand: other values on a GPU than on the CPU."""
        hidden, inter, num_experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
        sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
        routed = [torch.empty(num_experts, *size, dtype=torch.bfloat16, device=device) for size in sizes]
        for e in range(num_experts):  # one after the other: a layer's are tens of gigabytes
            for whole, part in zip(routed, _expert(hidden, inter, seed, 1 + e, device), strict=True):
                whole[e] = part
        if not shape.shared_intermediate_size:
            return cls(*routed)
        gate, up, down = routed
        return cls(gate, up, down, *_expert(hidden, shape.shared_intermediate_size, seed, 0, device))

    def of_rank(self, rank: int, num_ranks: int) -> Weights:
        """The same with only the experts of `rank`."""
        num_local = len(self.routed_gate) // num_ranks
        mine = slice(rank * num_local, (rank + 1) * num_local)
        return replace(
            self,
            routed_gate=self.routed_gate[mine],
            routed_up=self.routed_up[mine],
            routed_down=self.routed_down[mine],
        )

    def double(self) -> Weights:
        """The same in float64."""
        return Weights(*(None if w is None else w.double() for w in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Workload:
    """Inputs of one layer, lists by rank: x [T, H] bfloat16, expert_ids [T, K], router_weights [T, K] f32.

    T may differ from rank to rank and may be 0. `weights` holds all E experts. `d_output` is the gradient of the output
    that backward runs are given, random if None. `precision` is that of the routed experts: a run in mxfp8 quantizes
    the weights, which are bfloat16 here.
    """

    shape: MoEShape
    x: list[Tensor]
    expert_ids: list[Tensor]
    router_weights: list[Tensor]
    weights: Weights
    swiglu_limit: float | None = None
    d_output: list[Tensor] | None = None
    precision: str = "bf16"

    @classmethod
    def from_ids(
        cls,
        shape: MoEShape,
        expert_ids: Sequence[Tensor],
        router_weights: Sequence[Tensor] | None = None,
        *,
        seed: int = 0,
        swiglu_limit: float | None = None,
    ) -> Workload:
        """Random x and weights for given choices of every rank, on their device, and random router weights if none
        given.

        Raises ValueError if E is not divisible by the number of ranks, or an id tensor is not [T, K].
        """
        if not expert_ids or shape.num_experts % len(expert_ids) != 0:
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got {shape.num_experts} experts and "
                f"{len(expert_ids)} ranks"
            )
        xs, weights, device = [], [], expert_ids[0].device
        for rank, ids in enumerate(expert_ids):
            if ids.dim() != 2 or ids.shape[1] != shape.topk:
                raise ValueError(f"expert_ids of rank {rank} must be [T, {shape.topk}], got {list(ids.shape)}")
            generator = _generator(seed, 1_000_000 + rank, device)
            xs.append(torch.randn(len(ids), shape.hidden_size, generator=generator, device=device).bfloat16())
            weights.append(torch.rand(ids.shape, generator=generator, device=device))
        return cls(
            shape,
            xs,
            list(expert_ids),
            weights if router_weights is None else list(router_weights),
            Weights.random(shape, seed, device),
            swiglu_limit,
        )

    @classmethod
    def random(
        cls, shape: MoEShape, *, num_ranks: int, num_tokens: int, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Workload:
        """Every token chooses K different experts, all alike; made on `device`. Raises ValueError for K above E."""
        if shape.topk > shape.num_experts:
            raise ValueError(f"topk must be at most num_experts, got {shape.topk} and {shape.num_experts}")
        ids = []
        for rank in range(num_ranks):
            generator = _generator(seed, 1_500_000 + rank, device)
            chances = torch.rand(num_tokens, shape.num_experts, generator=generator, device=device)
            ids.append(chances.topk(shape.topk, dim=1).indices.int())
        return cls.from_ids(shape, ids, seed=seed)

    @classmethod
    def from_routing(
        cls,
        routing: Routing,
        shape: MoEShape,
        *,
        num_ranks: int,
        num_tokens: int | None,
        seed: int = 0,
    ) -> Workload:
        """Random x and weights for captured choices, `num_tokens` tokens a rank; None: as many as each captured rank
        had in the first capture.

        A rank replays the captures of one captured rank, one after the other. With more ranks than were
        captured, the surplus ranks go on where the earlier ones stopped, so no token is replayed twice.

        Raises ValueError if E or K of `shape` do not fit the routing, or it holds too few tokens.
        """
        _, num_captured_ranks, _, topk = routing.expert_ids.shape
        if shape.topk != topk:
            raise ValueError(f"topk of the shape must equal the routing's, got {shape.topk} and {topk}")
        if shape.num_experts < routing.num_experts:
            raise ValueError(
                f"num_experts of the shape must be at least the routing's, got {shape.num_experts} and "
                f"{routing.num_experts}"
            )
        if num_ranks < 1 or (num_tokens is not None and num_tokens < 0):
            raise ValueError(f"need at least 1 rank and 0 tokens, got {num_ranks} and {num_tokens}")
        num_rounds = math.ceil(num_ranks / num_captured_ranks)
        captured = [routing.of_rank(rank) for rank in range(num_captured_ranks)]
        wanted = [int(routing.num_tokens[0, r]) if num_tokens is None else num_tokens for r in range(len(captured))]
        places = []
        for rank, (ids, _) in enumerate(captured[:num_ranks]):
            if num_rounds * wanted[rank] > len(ids):
                raise ValueError(
                    f"{num_ranks} ranks of {wanted[rank]} tokens need {num_rounds * wanted[rank]} tokens of each "
                    f"captured rank; the routing holds {len(ids)} of rank {rank} of {num_captured_ranks}"
                )
        for rank in range(num_ranks):
            start, count = rank // num_captured_ranks * wanted[rank % len(captured)], wanted[rank % len(captured)]
            places.append((captured[rank % len(captured)], slice(start, start + count)))
        return cls.from_ids(
            shape,
            [ids[here].contiguous() for (ids, _), here in places],
            [weights[here].contiguous() for (_, weights), here in places],
            seed=seed,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    def to(self, device: str | torch.device) -> Workload:
        """The same on a device."""

        def move(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        weights = Weights(*(None if w is None else w.to(device) for w in vars(self.weights).values()))  # type: ignore[arg-type]
        return replace(
            self,
            x=move(self.x),
            expert_ids=move(self.expert_ids),
            router_weights=move(self.router_weights),
            weights=weights,
        )

    def reference(self, dtype: torch.dtype) -> list[Tensor]:
        """Output of the reference by rank: in float64 the truth, in bfloat16 torch's own rounding (and in mxfp8 its
        quantization, at the library's places)."""
        if self.precision == "mxfp8" and dtype != torch.float64:
            return reference.mxfp8.moe_ranks(
                self.x,
                self.expert_ids,
                self.router_weights,
                self.weights.routed_gate,
                self.weights.routed_up,
                self.weights.routed_down,
                self.weights.shared_gate,
                self.weights.shared_up,
                self.weights.shared_down,
                self.swiglu_limit,
            )
        weights = self.weights.double() if dtype == torch.float64 else self.weights
        out = reference.moe(
            torch.cat(self.x).to(dtype),
            torch.cat(self.expert_ids),
            torch.cat(self.router_weights),
            weights.routed_gate,
            weights.routed_up,
            weights.routed_down,
            weights.shared_gate,
            weights.shared_up,
            weights.shared_down,
            swiglu_limit=self.swiglu_limit,
        )
        return list(out.split([len(x) for x in self.x]))

    def d_outputs(self) -> list[Tensor]:
        """The gradient of the output [T, H] bfloat16, by rank."""
        if self.d_output is not None:
            return self.d_output
        sizes = [(len(x), self.shape.hidden_size) for x in self.x]
        return [torch.randn(size, generator=_generator(0, 2_000_000 + r)).bfloat16() for r, size in enumerate(sizes)]

    def reference_gradients(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """The gradients for `d_outputs`, by name (d_x, d_router_weights, d_routed_gate, ...) and rank: in float64 the
        truth, in bfloat16 torch's products at the library's rounding points (and in mxfp8 quantization points)."""
        is_quantized = self.precision == "mxfp8" and dtype != torch.float64
        layer_backward = reference.mxfp8.layer_backward if is_quantized else reference.layer_backward
        weights = self.weights.double() if dtype == torch.float64 else self.weights
        by_rank = layer_backward(
            [d_output.to(dtype) for d_output in self.d_outputs()],
            [x.to(dtype) for x in self.x],
            self.expert_ids,
            self.router_weights,
            weights.routed_gate,
            weights.routed_up,
            weights.routed_down,
            weights.shared_gate,
            weights.shared_up,
            weights.shared_down,
            self.swiglu_limit,
        )
        by_name = dict(zip(by_rank[0]._fields, zip(*by_rank, strict=True), strict=True))
        return {f"d_{name}": list(parts) for name, parts in by_name.items() if parts[0] is not None}


def _generator(seed: int, stream: int, device: torch.device | str = "cpu") -> torch.Generator:
    # Any two (seed, stream) pairs of practical size give different seeds; every seed of 64 bits has one.
    return torch.Generator(device).manual_seed((seed * 2_000_003 + stream) % 2**64)


def _expert(
    hidden_size: int, width: int, seed: int, stream: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """gate [width, H], up [width, H], down [H, width] in bfloat16."""
    generator = _generator(seed, stream, device)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5).bfloat16()

    return matrix(width, hidden_size), matrix(width, hidden_size), matrix(hidden_size, width)
