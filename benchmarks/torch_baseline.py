"""The layer as one would write it in torch today: sort, grouped_mm, SwiGLU, grouped_mm, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x times their expert's weight; weight [E, K, N] in either memory layout, ends int32 [E]."""
    return torch._grouped_mm(x, weight, offs=ends)


def swiglu(gate_up: Tensor) -> Tensor:
    """h of [rows, 2 I]: gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def forward(x: Tensor, expert_ids: Tensor, router_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """x [T, H], expert_ids [T, K], router_weights [T, K]; w_gate_up [E, H, 2 I], w_down [E, I, H] (any layout)."""
    num_tokens, topk = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.zeros(w_gate_up.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    y = grouped(swiglu(grouped(x[order // topk], w_gate_up, ends)), w_down, ends)
    unsorted = torch.empty_like(y)
    unsorted[order] = y
    weighted = unsorted.view(num_tokens, topk, -1) * router_weights.to(x.dtype).unsqueeze(-1)
    return weighted.sum(1)
