"""Ways to compute one layer on several ranks: this library, NCCL and torch, DeepEP and torch.

All start from x, top-k ids and router weights and end with [T, H] in bfloat16. The torch parts are eager, or have their
SwiGLU and weighted sum compiled (one kernel each, for any number of rows). They run on the CPU too, for tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_baseline
from torch import Tensor, distributed

from mok_modular import MoEShape, MoKConfig, Workspace, functional

OURS: dict[str, dict[str, Any]] = {
    "fused": {"mode": "fused"},
    "fused, pull once": {"mode": "fused", "dispatch": "pull_once", "minibatch_size": 4096, "macrobatch_size": 1 << 18},
    "split": {"mode": "dispatch|gate_up+swiglu|down|combine"},
}
"""This library's contenders: the options of their MoKConfig; a minibatch that is not among them suits the layer. A
further one is an entry here; it gets a workspace of its own where its options ask for one."""
NCCL, DEEP_EP = "NCCL + torch", "DeepEP + torch"
DEEP_EP_SMS = 24
MAX_ERROR = 0.02
"""Between two contenders' outputs: they round at other places, which makes 0.003 to 0.006."""


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens and experts."""

    layer: MoEShape
    num_ranks: int
    x: Tensor
    ids: Tensor  # int64 [T, K]
    ids32: Tensor
    router_weights: Tensor  # float32 [T, K]
    w_gate: Tensor  # [El, I, H]
    w_up: Tensor
    w_down: Tensor  # [El, H, I]
    w_gate_up: Tensor  # both again, [El, H, 2 I], K contiguous

    @property
    def num_local_experts(self) -> int:
        return len(self.w_gate)

    @classmethod
    def random(
        cls, layer: MoEShape, ids: Tensor, num_ranks: int, rank: int, device: Any, like: Inputs | None
    ) -> Inputs:
        """`like`: inputs of the same layer, whose weights are taken."""
        generator = torch.Generator(device).manual_seed(rank)

        def random(*dims: int) -> Tensor:
            return torch.randn(*dims, device=device, generator=generator).bfloat16() / dims[-1] ** 0.5

        local, hidden, inter = layer.num_experts // num_ranks, layer.hidden_size, layer.intermediate_size
        if like is None:
            gate, up, down = random(local, inter, hidden), random(local, inter, hidden), random(local, hidden, inter)
            both = torch.cat([gate, up], dim=1).transpose(1, 2)
        else:
            gate, up, down, both = like.w_gate, like.w_up, like.w_down, like.w_gate_up
        ids = ids.to(device)
        x = torch.randn(len(ids), hidden, device=device, generator=generator).bfloat16()
        router_weights = torch.rand(ids.shape, device=device, generator=generator)
        return cls(layer, num_ranks, x, ids, ids.int(), router_weights, gate, up, down, both)


class Ours:
    """Schedule and forward of this library."""

    def __init__(self, workspace: Workspace, config: MoKConfig) -> None:
        self.workspace, self.config = workspace, config

    def __call__(self, inputs: Inputs) -> Tensor:
        schedule = functional.build_schedule(
            self.workspace, self.config, inputs.ids32, num_local_experts=inputs.num_local_experts
        )
        return functional.forward(
            self.config, self.workspace, schedule, inputs.x, inputs.router_weights, None, None, None,
            inputs.w_gate, inputs.w_up, inputs.w_down, save_context=False,
        )[0]  # fmt: skip


# ---- what the baselines share ----


def weighted_sum(rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] * rows[place[t, k]], as torch_baseline has it."""
    weighted = rows[place.view(-1)].view(*place.shape, -1) * weights.to(rows.dtype).unsqueeze(-1)
    return weighted.sum(1)


def weighted_sum_unrolled(rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """The same for a compiler: one kernel that reads every row once, and adds in float32."""
    total = rows[place[:, 0]].float() * weights[:, 0, None]
    for k in range(1, place.shape[1]):
        total = total + rows[place[:, k]].float() * weights[:, k, None]
    return total.to(rows.dtype)


@dataclass(frozen=True)
class LocalParts:
    """The element-wise parts, eager or compiled."""

    swiglu: Callable[[Tensor], Tensor] = torch_baseline.swiglu
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum

    @classmethod
    def compiled(cls) -> LocalParts:
        torch._dynamo.config.recompile_limit = 64  # sizes that happen to be equal in one case are not in another
        return cls(
            torch.compile(torch_baseline.swiglu, dynamic=True), torch.compile(weighted_sum_unrolled, dynamic=True)
        )

    def experts(self, rows: Tensor, ends: Tensor, inputs: Inputs) -> Tensor:
        """The experts' products for rows that are in their order."""
        hidden = self.swiglu(torch_baseline.grouped(rows, inputs.w_gate_up, ends))
        return torch_baseline.grouped(hidden, inputs.w_down.transpose(1, 2), ends)


def sort_routes(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Routes in the order of their experts: which route is where, where each route is, routes an expert. An id of
    `num_experts` is no route and comes last."""
    key = ids.view(-1).to(torch.uint8)  # sorts in one pass of a radix sort
    order = key.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids.view(-1).long(), torch.ones_like(place))
    return order, place, counts[:num_experts]


class HostCopy:
    """Small numbers on their way to the host while the GPU goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        if not tensor.is_cuda:
            self._copy = tensor
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class Nccl:
    """Rows sorted by expert, all-to-all there and back. The host waits for the parts' sizes, behind the gather."""

    def __init__(self, group: Any, parts: LocalParts) -> None:
        self.group, self.parts = group, parts

    def __call__(self, inputs: Inputs) -> Tensor:
        topk, num_local = inputs.layer.topk, inputs.num_local_experts
        order, place, counts = sort_routes(inputs.ids, inputs.layer.num_experts)
        arriving = torch.empty_like(counts)
        distributed.all_to_all_single(arriving, counts, group=self.group)
        sizes = HostCopy(torch.stack([counts, arriving]).view(2, inputs.num_ranks, num_local).sum(2))
        leaving_rows = inputs.x[order // topk]
        sent, came = sizes.wait()
        arrived = inputs.x.new_empty(sum(came), inputs.x.shape[1])
        distributed.all_to_all_single(arrived, leaving_rows, came, sent, group=self.group)

        # Arrived by rank and, inside, by expert; wanted by expert and, inside, by rank: prefix sums, no second sort.
        by_rank = arriving.view(inputs.num_ranks, num_local)
        by_expert = by_rank.t().reshape(-1)
        start = by_rank.reshape(-1).cumsum(0).view_as(by_rank) - by_rank
        wanted_start = (by_expert.cumsum(0) - by_expert).view(num_local, inputs.num_ranks).t()
        shift = wanted_start - start
        index = torch.arange(len(arrived), device=arrived.device)
        there = index + shift.reshape(-1).repeat_interleave(arriving, output_size=len(arrived))
        back = index - shift.t().reshape(-1).repeat_interleave(by_expert, output_size=len(arrived))
        ends = by_rank.sum(0).cumsum(0).int()
        y = self.parts.experts(arrived[back], ends, inputs)[there]

        home = torch.empty_like(leaving_rows)
        distributed.all_to_all_single(home, y, sent, came, group=self.group)
        return self.parts.weighted_sum(home, place.view(-1, topk), inputs.router_weights)


class DeepEp:
    """DeepEP's dispatch and combine; between them rows are sorted by expert and summed by token again."""

    def __init__(self, buffer: Any, parts: LocalParts) -> None:
        self.buffer, self.parts = buffer, parts

    def __call__(self, inputs: Inputs) -> Tensor:
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(inputs.ids, inputs.layer.num_experts)
        x, ids, weights, counts, handle, _ = self.buffer.dispatch(
            inputs.x,
            topk_idx=inputs.ids,
            topk_weights=inputs.router_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        out, _, _ = self.buffer.combine(self.local(x, ids, weights, sum(counts), inputs), handle)
        return out

    def local(self, x: Tensor, ids: Tensor, weights: Tensor, num_rows: int, inputs: Inputs) -> Tensor:
        """x [n, H] tokens with an expert here, ids [n, K] local or -1 (with weight 0); num_rows of them are not -1."""
        num_local, topk = inputs.num_local_experts, inputs.layer.topk
        order, place, counts = sort_routes(torch.where(ids < 0, num_local, ids), num_local)
        y = self.parts.experts(x[order[:num_rows] // topk], counts.cumsum(0).int(), inputs)
        return self.parts.weighted_sum(y, place.clamp(max=num_rows - 1).view(-1, topk), weights)


def open_deep_ep(group: Any, hidden_size: int) -> Any:
    """DeepEP's buffer for hidden sizes up to this one; None where DeepEP is not installed. `group`: a gloo group."""
    if importlib.util.find_spec("deep_ep") is None:
        return None
    from deep_ep import Buffer

    Buffer.set_num_sms(DEEP_EP_SMS)
    size = group.size()
    configs = (Buffer.get_dispatch_config(size), Buffer.get_combine_config(size))
    num_bytes = max(config.get_nvl_buffer_size_hint(2 * hidden_size, size) for config in configs)
    return Buffer(group, num_bytes, 0, explicitly_destroy=True)


def baselines(group: Any, deep_ep: Any) -> dict[str, Callable[[Inputs], Tensor]]:
    """The contenders of others, eager and compiled. `deep_ep`: what open_deep_ep gave."""
    found: dict[str, Callable[[Inputs], Tensor]] = {}
    for suffix, parts in (("", LocalParts()), (", compiled", LocalParts.compiled())):
        found[NCCL + suffix] = Nccl(group, parts)
        if deep_ep is not None:
            found[DEEP_EP + suffix] = DeepEp(deep_ep, parts)
    return found


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; NaN where either has one."""
    return float((output.float() - expected.float()).norm() / expected.float().norm())
