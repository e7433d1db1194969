"""Reverse combine: the gradients of the outputs go from their tokens to the rows that made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.stages import dispatch
from mok_modular.stages.tables import Tables, check_tables, kernel_tables
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(
    d_outputs: Sequence[Tensor], router_weights: Sequence[Tensor], schedules: Sequence[Tables], *, topk: int
) -> list[tuple[Tensor, Tensor]]:
    """Returns every owner's rows of d_output [num_rows_r, H], in the dtype of ``d_outputs``, and the router weights of
    its rows [num_rows_r], in theirs: a pair a rank.

    ``d_outputs`` holds the gradients of every rank's outputs [T_r, H], ``router_weights`` its weights [T_r, K] float32,
    ``schedules`` every rank's tables, from either form of the schedule stage. Row i of an owner is token
    ``peer_token_idx[i] // topk`` of rank ``peer_rank[i]``, and its weight that of the route ``peer_token_idx[i]``
    there. A padding row (peer_rank -1) is zero, and so is its weight. All of it is copied: nothing is rounded, and no
    weight is multiplied here. It is the transpose of combine and of reduce's sum over k, without the weights.

    Raises ValueError for wrong shapes and for a table entry that names no token.
    """
    _check(d_outputs, router_weights, schedules, topk)
    rows = dispatch.reference(d_outputs, schedules, topk=topk)
    # A row's weight: its route is the token of a layer with one expert a token.
    cells = dispatch.reference([weights.reshape(-1, 1) for weights in router_weights], schedules, topk=1)
    return [(mine, weights[:, 0]) for mine, weights in zip(rows, cells, strict=True)]


def launch(
    d_outputs: Sequence[Tensor],
    router_weights: Sequence[Tensor],
    schedules: Sequence[Tables],
    *,
    topk: int,
    group: LocalGroup | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """``reference`` by the compiled stage, on the ranks of ``group`` (a fresh LocalGroup if None). ``d_outputs`` are
    bfloat16 and ``router_weights`` float32 on the CPU; no gradients.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device.
    """
    device = stage_arguments.check_devices(d_outputs=d_outputs, router_weights=router_weights, schedules=schedules)
    _check(d_outputs, router_weights, schedules, topk)
    stage_arguments.check_bfloat16(**{f"d_outputs[{rank}]": d for rank, d in enumerate(d_outputs)})
    for rank, weights in enumerate(router_weights):
        stage_arguments.check_float32(f"router_weights[{rank}]", weights)
    tables, row_block = kernel_tables(schedules)
    hidden_size = d_outputs[0].shape[1]
    run = stage_run.open_run(
        "reverse_combine",
        tables,
        row_block=row_block,
        num_tokens=[len(d) for d in d_outputs],
        topk=topk,
        hidden_size=hidden_size,
        kind="backward",
        device=device,
        group=group,
    )
    for rank, (d_output, weights) in enumerate(zip(d_outputs, router_weights, strict=True)):
        run.fill(rank, "d_output", d_output)
        run.floats(rank, "router_weights")[: weights.numel()] = weights.detach().flatten()
    run.launch()
    out = []
    for rank, s in enumerate(schedules):
        num_rows = int(s.segment_start[-1])
        rows = run.region(rank, "ring_d_y", hidden_size)[:num_rows].clone()
        out.append((rows, run.floats(rank, "ring_weight")[:num_rows].clone()))
    return out


def _check(
    d_outputs: Sequence[Tensor], router_weights: Sequence[Tensor], schedules: Sequence[Tables], topk: int
) -> None:
    if not d_outputs or any(d.dim() != 2 or d.shape[1] != d_outputs[0].shape[-1] for d in d_outputs):
        shapes = [tuple(d.shape) for d in d_outputs]
        raise ValueError(f"d_outputs must hold [T, H] with one H on all ranks, not {shapes}")
    if topk < 1:
        raise ValueError(f"topk={topk} must be at least 1")
    wanted = [(len(d), topk) for d in d_outputs]
    if [tuple(weights.shape) for weights in router_weights] != wanted:
        shapes = [tuple(weights.shape) for weights in router_weights]
        raise ValueError(f"router_weights must hold [T, K] = {wanted}, not {shapes}")
    if any(weights.dtype not in (torch.float32, torch.float64) for weights in router_weights):
        raise TypeError(f"router_weights must be torch.float32, not {[weights.dtype for weights in router_weights]}")
    check_tables(schedules, [len(d) * topk for d in d_outputs])
