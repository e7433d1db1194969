"""Grouped dgrad: each local expert multiplies the gradients of its segment of rows by its own weight as it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.stages import grouped_gemm
from mok_modular.stages.tables import check_segments
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(
    rows: Tensor | tuple[Tensor, Tensor],
    weight: Tensor | tuple[Tensor, Tensor],
    segment_start: Tensor,
    segment_num_rows: Tensor,
) -> Tensor:
    """Returns ``rows @ weight[expert]`` [num_rows, N], segment by segment, in the dtype of ``rows``: one tensor of each
    is the down projection's (d_y and w_down give d_h), a pair of each is gate's and up's (d_gate, d_up and w_gate, w_up
    give d_x), whose two products make one sum.

    ``rows`` is [num_rows, Kdim] and ``weight`` [El, Kdim, N], both bfloat16, float32 or float64; of a pair both have
    one shape. ``segment_start`` (int32 [El+1]) and ``segment_num_rows`` (int32 [El]) come from the schedule. bfloat16
    is multiplied and summed in float32 and rounded once at the end, of a pair behind the second product; the other
    dtypes keep their own precision. These are grouped_gemm's products with the weight turned: y = h W^T gives d_h = d_y
    W.

    Padding rows are never read (they may hold NaN) and come out as zeros, as do rows past the last segment.

    Raises TypeError when the dtypes differ, ValueError for wrong shapes and for segments that overlap or pass
    the end.
    """
    all_rows, all_weights = _pairs(rows, weight)
    _check(all_rows, all_weights, segment_start, segment_num_rows)
    whole = torch.cat(all_weights, dim=1)  # one sum over both
    return grouped_gemm.reference(torch.cat(all_rows, dim=1), whole.mT, segment_start, segment_num_rows)


def launch(
    rows: Tensor | tuple[Tensor, Tensor],
    weight: Tensor | tuple[Tensor, Tensor],
    segment_start: Tensor,
    segment_num_rows: Tensor,
    *,
    row_block: int = 128,
    group: LocalGroup | None = None,
) -> Tensor:
    """``reference`` by the compiled stages down_dgrad and gate_up_dgrad (a pair), each alone in its kernel, on the one
    rank of ``group`` (a fresh LocalGroup if None). All tensors are bfloat16 on the CPU; no gradients. The sums of a row
    run over k ascending, of a pair gate's first, whatever rows stand beside it.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device, for Kdim or N
    that is no multiple of 64 and for segments that are not as many row blocks as their rows need.
    """
    device = stage_arguments.check_devices(
        rows=rows, weight=weight, segment_start=segment_start, segment_num_rows=segment_num_rows
    )
    all_rows, all_weights = _pairs(rows, weight)
    is_pair = len(all_rows) == 2
    _check(all_rows, all_weights, segment_start, segment_num_rows)
    stage_arguments.check_bfloat16(rows=all_rows[0])
    num_k, num_cols = all_weights[0].shape[1:]
    stage_arguments.check_width("Kdim", num_k)
    stage_arguments.check_width("N", num_cols)
    run = stage_run.open_run(
        "gate_up_dgrad" if is_pair else "down_dgrad",
        [stage_arguments.segment_tables(segment_start, segment_num_rows, row_block)],
        row_block=row_block,
        num_tokens=[0],
        hidden_size=num_cols if is_pair else num_k,
        intermediate_size=num_k if is_pair else num_cols,
        kind="backward",
        device=device,
        group=group,
    )
    num_rows = int(segment_start[-1])
    for name, each in zip(("ring_d_gate", "ring_d_up") if is_pair else ("ring_d_y",), all_rows, strict=True):
        run.fill(0, name, each[:num_rows])
    names = ("w_routed_gate", "w_routed_up") if is_pair else ("w_routed_down",)
    run.launch([{name: each.detach().contiguous() for name, each in zip(names, all_weights, strict=True)}])
    out = all_rows[0].new_zeros(len(all_rows[0]), num_cols)
    out[:num_rows] = run.region(0, "ring_y" if is_pair else "ring_d_hidden", num_cols)[:num_rows]
    return out


def _pairs(
    rows: Tensor | tuple[Tensor, Tensor], weight: Tensor | tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    all_rows = (rows,) if isinstance(rows, Tensor) else tuple(rows)
    all_weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    if len(all_rows) != len(all_weights) or len(all_rows) not in (1, 2):
        raise ValueError(
            "rows and weight must both be one tensor (down) or both a pair (gate and up), not "
            f"{len(all_rows)} and {len(all_weights)}"
        )
    return all_rows, all_weights


def _check(
    rows: tuple[Tensor, ...], weights: tuple[Tensor, ...], segment_start: Tensor, segment_num_rows: Tensor
) -> None:
    for each, weight in zip(rows, weights, strict=True):
        if each.dtype != weight.dtype or each.dtype != rows[0].dtype:
            raise TypeError(f"weight has dtype {weight.dtype} but rows have {each.dtype}; they must be the same")
        if each.shape != rows[0].shape or weight.shape != weights[0].shape:
            raise ValueError("of a pair both rows must have one shape, and both weights")
        if each.dim() != 2 or weight.dim() != 3 or each.shape[1] != weight.shape[1]:
            raise ValueError(
                "rows must be [num_rows, Kdim] and weight [El, Kdim, N] with the same Kdim, not "
                f"{tuple(each.shape)} and {tuple(weight.shape)}"
            )
    check_segments(len(weights[0]), segment_start, segment_num_rows, len(rows[0]))
