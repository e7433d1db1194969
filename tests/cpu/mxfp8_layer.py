"""Calls of the MXFP8 layer for tests: quantized weights of a workload, forward and backward of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from helpers import build, make_workload, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, functional, ops
from mok_modular.testing import Workload

SIZES = {"H": 128, "I": 256, "S": 384, "E": 8, "K": 3}
GRADIENTS = (
    "x",
    "router_weights",
    "routed_gate",
    "routed_up",
    "routed_down",
    "shared_gate",
    "shared_up",
    "shared_down",
)


def make_mxfp8_workload(num_tokens: list[int], **options: Any) -> Workload:
    return make_workload(num_tokens, **{**SIZES, **options})


def weights_of(workload: Workload, member: Any, *, for_backward: bool = False, is_mxfp8: bool = True) -> list[Any]:
    """The six weights of a rank as functional.forward or backward takes them."""
    mine = workload.weights.of_rank(member.rank(), member.size())
    routed: list[Any] = [mine.routed_gate, mine.routed_up, mine.routed_down]
    if is_mxfp8:
        parts = [ops.mxfp8_quantize(w, rowwise=True, columnwise=True) for w in routed]
        routed = [*parts[:2], parts[2][2:]] if for_backward else [part[:2] for part in parts]
    return [mine.shared_gate, mine.shared_up, mine.shared_down, *routed]


def forward(
    workload: Workload, workspace: Any, config: MoKConfig, schedule: Any, *, is_mxfp8: bool = True, **options: Any
) -> tuple[Tensor, functional.MoKForwardContext]:
    rank = workspace.member.rank()
    weights = weights_of(workload, workspace.member, is_mxfp8=is_mxfp8)
    inputs = (workload.x[rank], workload.router_weights[rank])
    return functional.forward(config, workspace, schedule, *inputs, *weights, workload.swiglu_limit, **options)


def backward(
    workload: Workload,
    workspace: Any,
    config: MoKConfig,
    schedule: Any,
    context: functional.MoKForwardContext,
    *,
    is_mxfp8: bool = True,
    function: Any = functional.backward,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    rank = workspace.member.rank()
    weights = weights_of(workload, workspace.member, for_backward=True, is_mxfp8=is_mxfp8)
    inputs = (d_outputs(workload)[rank], workload.x[rank], workload.router_weights[rank])
    return function(config, workspace, schedule, context, *inputs, *weights, workload.swiglu_limit, **options)


def d_outputs(workload: Workload) -> list[Tensor]:
    generator = torch.Generator().manual_seed(77)
    return [torch.randn(x.shape, generator=generator).bfloat16() for x in workload.x]


def run_both(
    workload: Workload, config: MoKConfig | None = None, *, is_mxfp8: bool = True, recompute: bool = False, **group: Any
) -> dict[str, Tensor]:
    """Output and gradients of all ranks, one rank after the other, of one forward and backward."""
    config = config or MoKConfig()

    def step(member: Any) -> list[Tensor]:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        output, context = forward(workload, workspace, config, schedule, is_mxfp8=is_mxfp8)
        if recompute:
            weights = weights_of(workload, member, is_mxfp8=is_mxfp8)
            del weights[5], weights[2]
            x = workload.x[member.rank()]
            context = functional.recompute_forward_context(config, workspace, schedule, x, *weights)
        gradients = backward(workload, workspace, config, schedule, context, is_mxfp8=is_mxfp8)
        return [output, *(output.new_empty(0) if g is None else g for g in gradients)]

    by_rank = LocalGroup(workload.num_ranks, **group).run(step)
    return {
        name: torch.cat(parts) for name, parts in zip(("output", *GRADIENTS), zip(*by_rank, strict=True), strict=True)
    }
