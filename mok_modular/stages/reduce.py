"""Reduce: a token's expert outputs, weighted by the router, are added to its shared-expert output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mok_modular.full_precision import full_precision
from mok_modular.targets import stage_arguments, stage_run

if TYPE_CHECKING:
    from mok_modular.ranks.group import LocalGroup


@full_precision()
def reference(combined: Tensor, router_weights: Tensor, route_mask: Tensor, shared: Tensor | None) -> Tensor:
    """Returns the layer's output [T, H], in the dtype of ``combined``.

    ``acc = shared; acc = fma(w_k, row_k, acc)`` for k ascending. ``combined`` is [T*K, H] (bfloat16, float32
    or float64), ``router_weights`` [T, K] float32 (float64 also when combined is float64), ``route_mask`` [T,
    K] bool, ``shared`` [T, H] in the dtype of combined, or None for zeros.

    The accumulator is float32 and is rounded once at the end. The fused multiply-add goes through float64:
    there the product of two float32 is exact, and the sum rounds to float64 before float32. That double
    rounding can differ from a true FMA by one float32 ulp, about once in 2^29 sums. float64 input is
    accumulated in plain float64.

    A missing route (mask False) is skipped: its row and its weight may be NaN, and their gradients are zero.

    Raises TypeError for other dtypes, ValueError for wrong shapes.
    """
    _check(combined, router_weights, route_mask, shared)
    num_tokens, topk = router_weights.shape
    accumulator_dtype = torch.float64 if combined.dtype == torch.float64 else torch.float32
    # Zeros stand in for what must not be read, so that neither a value nor a gradient can carry a NaN out.
    weights = router_weights.where(route_mask, 0).double()
    rows = combined.reshape(num_tokens, topk, combined.shape[1]).where(route_mask[:, :, None], 0)
    if shared is None:
        shared = combined.new_zeros(num_tokens, combined.shape[1])
    acc = shared.to(accumulator_dtype)
    for k in range(topk):
        fma = (weights[:, k, None] * rows[:, k].double() + acc.double()).to(accumulator_dtype)
        acc = fma.where(route_mask[:, k, None], acc)
    return acc.to(combined.dtype)


def launch(
    combined: Tensor,
    router_weights: Tensor,
    route_mask: Tensor,
    shared: Tensor | None,
    *,
    group: LocalGroup | None = None,
) -> Tensor:
    """``reference`` by the compiled stage, on the one rank of ``group`` (a fresh LocalGroup if None). combined and
    shared are bfloat16 on the CPU or a GPU (where the kernel then runs) with H a multiple of 64, router_weights
    float32; no gradients. Here the fused multiply-add is a true one.

    Raises what ``reference`` raises, and TypeError for another dtype, ValueError for another device or H.
    """
    device = stage_arguments.check_devices(
        combined=combined, router_weights=router_weights, route_mask=route_mask, shared=shared
    )
    _check(combined, router_weights, route_mask, shared)
    stage_arguments.check_bfloat16(combined=combined)
    num_tokens, topk = router_weights.shape
    hidden_size = combined.shape[1]
    stage_arguments.check_width("H of combined", hidden_size)
    row_block = stage_arguments.ROW_BLOCKS[0]
    tables = stage_arguments.segment_tables(torch.zeros(2, dtype=torch.int32), torch.zeros(1), row_block)
    tables["route_rank"] = torch.where(route_mask, 0, -1).to(torch.int32).cpu().contiguous()
    run = stage_run.open_run(
        "reduce",
        [tables],
        row_block=row_block,
        num_tokens=[num_tokens],
        topk=topk,
        hidden_size=hidden_size,
        shared_size=0 if shared is None else 64,  # any: it is the shared expert's result that counts
        device=device,
        group=group,
    )
    run.fill(0, "combine", combined)
    if shared is not None:
        run.fill(0, "shared_y", shared)
    output = torch.full((num_tokens, hidden_size), float("nan"), dtype=torch.bfloat16, device=device)
    run.launch([{"router_weights": router_weights.detach().contiguous(), "output": output}])
    return output


def _check(combined: Tensor, router_weights: Tensor, route_mask: Tensor, shared: Tensor | None) -> None:
    is_float64 = combined.dtype == torch.float64
    if router_weights.dtype != torch.float32 and not (is_float64 and router_weights.dtype == torch.float64):
        raise TypeError(f"router_weights have dtype {router_weights.dtype}; they must be torch.float32")
    if route_mask.dtype != torch.bool:
        raise TypeError(f"route_mask has dtype {route_mask.dtype}; it must be torch.bool")
    if shared is not None and shared.dtype != combined.dtype:
        raise TypeError(f"shared has dtype {shared.dtype} but combined has {combined.dtype}; they must be the same")
    if router_weights.dim() != 2 or route_mask.shape != router_weights.shape:
        raise ValueError(
            f"router_weights and route_mask must both be [T, K], not {tuple(router_weights.shape)} "
            f"and {tuple(route_mask.shape)}"
        )
    if combined.dim() != 2 or len(combined) != router_weights.numel():
        raise ValueError(f"combined must be [T*K, H] with T*K = {router_weights.numel()}, not {tuple(combined.shape)}")
    if shared is not None and shared.shape != (len(router_weights), combined.shape[1]):
        raise ValueError(
            f"shared must be [T, H] = [{len(router_weights)}, {combined.shape[1]}], not {tuple(shared.shape)}"
        )
