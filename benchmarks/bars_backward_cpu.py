"""Bars of the backward and of training on CPU ranks, in BF16 and MXFP8: the same bits of the output and of all
gradients whatever runs, what they must be near to, and the training example.

As for the forward, everything that must not change a bit is varied against one base run: the shipped capture on 4
ranks and a ring of two slots, so that a backward replays, and carries weight gradients over macrobatches.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bar import Bar
from bars_forward_cpu import BASE, ERROR_SHAPES, NUM_ORDERS, captured_workload, config, on_ranks, random_workload
from torch import Tensor

from mok_modular import LocalGroup, MoEShape, MoKConfig, ops
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import MAX_RATIO, PassesResult, Workload, check_passes, run_passes

ROOT = Path(__file__).resolve().parents[1]
PLANS = [str(plan) for plan in all_plans()]
NUM_MXFP8_ORDERS = 40
NUM_STEPS = 200
COVERS = ("examples/train_tiny_moe.py", "tests/mxfp8_model.py")


def bars(quick: bool) -> Iterator[Bar]:
    torch.set_num_threads(1)
    workload = captured_workload()
    mxfp8 = dataclasses.replace(workload, precision="mxfp8")
    yield from bits_of("BF16", workload, NUM_ORDERS, quick)
    yield from right()
    yield from bits_of("MXFP8", mxfp8, NUM_MXFP8_ORDERS, quick)
    yield from quantization()
    yield from near_bf16(workload, mxfp8)
    if not quick:
        yield from training()


# ---- bits ----


def bits_of(precision: str, workload: Workload, num_orders: int, quick: bool) -> Iterator[Bar]:
    base = run(workload, BASE)
    every = 5 if quick else 1  # of 16 plans: 4
    plans = PLANS[::every]
    num_orders = len(plans) if quick else num_orders

    def bits(name: str, results: Iterable[PassesResult]) -> Bar:
        num_differing = sum(not is_same(base, result) for result in results)
        return Bar(f"{precision}, same bits: {name}", num_differing, "at most", 0, "differing runs")

    yield bits(f"{len(plans)} plans", (run(workload, config(mode=mode)) for mode in plans))
    yield bits(
        f"{num_orders} random orders, over {len(plans)} plans",
        (run(workload, config(mode=plans[i % len(plans)]), order="random", seed=i) for i in range(num_orders)),
    )
    yield bits(
        "minibatch sizes",
        (run(workload, config(minibatch_size=rows, macrobatch_size=1024)) for rows in (128, 256, 512, 1024)[::every]),
    )
    yield bits(
        "macrobatch sizes",
        (run(workload, config(macrobatch_size=rows)) for rows in (256, 512, 768, 1024, 2048, 131072)[::every]),
    )
    yield bits(
        "worker counts, on fibers and threads",
        (
            run(workload, config(bwd_num_comm_sms=num_comm), executor=executor, num_workers=num_workers)
            for executor in ("fibers", "threads")
            for num_workers, num_comm in ((2, 1), (1, None), (3, None), (5, 3), (8, None))[::every]
        ),
    )
    yield bits(
        "row blocks",
        (
            run(workload, config(row_block=rows, mode=mode))
            for rows in (256, 128)[::every]
            for mode in ("fused", "split")
        ),
    )
    if workload.precision == "mxfp8":  # BF16 operands have no other wire
        yield bits(
            f"wires bf16 and mxfp8, {len(plans)} plans",
            (run(workload, config(wire=wire, mode=mode)) for wire in ("bf16", "mxfp8") for mode in plans),
        )
    yield bits("recomputed context", (run(workload, config(mode=mode), is_recomputed=True) for mode in plans))
    num_ranks = (1, 2, 4)[::every]
    yield Bar(
        f"{precision}, same bits of output, d_x and d_router_weights: R = {', '.join(map(str, num_ranks))}",
        sum(not is_same(base, run(on_ranks(workload, r), BASE), *TOKEN_TENSORS) for r in num_ranks),
        "at most",
        0,
        "differing runs",
    )


TOKEN_TENSORS = ("output", "d_x", "d_router_weights")
"""What belongs to a token; weight gradients sum over rows in an order that depends on R."""


def run(workload: Workload, config: MoKConfig, *, is_recomputed: bool = False, **group_options: Any) -> PassesResult:
    group = LocalGroup(workload.num_ranks, **group_options)
    return run_passes(group, workload, config, is_context_recomputed=is_recomputed)


def is_same(a: PassesResult, b: PassesResult, *names: str) -> bool:
    """Whether all bits of these tensors agree, of all tensors without names; ranks one after the other."""
    return all(
        torch.equal(torch.cat(a.tensors[name]).view(torch.uint8), torch.cat(b.tensors[name]).view(torch.uint8))
        for name in names or a.tensors
    )


# ---- right ----


def right() -> Iterator[Bar]:
    worst = 0.0
    for hidden, inter, num_experts, topk, shared, num_ranks, num_tokens in ERROR_SHAPES:
        shape = MoEShape("error", hidden, inter, num_experts, topk, shared)
        workload = random_workload(shape, num_ranks, [num_tokens - rank for rank in range(num_ranks)])
        worst = max_of(worst, *(check.ratio for check in check_passes(workload, run(workload, BASE)).values()))
    yield Bar(
        f"error of output and gradients against float64 autograd over torch's, worst of {len(ERROR_SHAPES)} shapes",
        worst,
        "at most",
        MAX_RATIO,
    )

    shape = MoEShape("router", 192, 320, num_experts=12, topk=3, shared_intermediate_size=64)
    workload = random_workload(shape, 2, [97, 64])
    ones = run(with_router_weights(workload, 1.0), BASE)
    num_differing, worst = 0, 0.0
    for weight in (0.0, -1.5, 1e-20, -1e-20):
        odd = with_router_weights(workload, weight)
        result = run(odd, BASE)
        num_differing += not is_same(ones, result, "d_router_weights")
        worst = max_of(worst, check_passes(odd, result)["d_router_weights"].ratio)
    name = "router gradient for weights 0, -1.5, 1e-20, -1e-20"
    yield Bar(f"{name}: not the bits that a weight of 1 gets", num_differing, "at most", 0, "runs")
    yield Bar(f"{name}: error against float64 over torch's", worst, "at most", MAX_RATIO)

    # Fresh tensors are full of NaN, and so is fresh memory of a workspace.
    torch.use_deterministic_algorithms(True)
    try:
        few = dataclasses.replace(workload, expert_ids=[ids.clamp(max=4) for ids in workload.expert_ids])
        num_nonzero = 0
        for mode in PLANS:
            gradients = run(few, config(mode=mode)).gradients
            for part in ("gate", "up", "down"):
                num_nonzero += int(torch.cat(gradients[f"d_routed_{part}"])[5:].view(torch.int16).count_nonzero())
    finally:
        torch.use_deterministic_algorithms(False)
    yield Bar("gradients of experts without rows, 16 plans: values that are not zero", num_nonzero, "at most", 0)


def with_router_weights(workload: Workload, value: float) -> Workload:
    return dataclasses.replace(workload, router_weights=[torch.full_like(w, value) for w in workload.router_weights])


def max_of(*values: float) -> float:
    """NaN if one is."""
    return float(torch.tensor(values, dtype=torch.float64).max())


# ---- MXFP8 ----


def quantization() -> Iterator[Bar]:
    """Against the exact model of the tests, which shares nothing with the library."""
    sys.path.insert(0, str(ROOT / "tests"))
    model = importlib.import_module("mxfp8_model")
    num_differing = 0
    for x in mxfp8_blocks():
        data, scale, data_t, scale_t = ops.mxfp8_quantize(x, rowwise=True, columnwise=True)
        for source, got_data, got_scale in ((x, data, scale), (x.T.contiguous(), data_t, scale_t)):
            codes, scales = model.quantize(source)
            num_differing += int((got_data.view(torch.uint8) != codes).sum())
            num_differing += int((got_scale != model.tiled(scales)).sum())
    yield Bar(
        "MXFP8 quantization, both orientations: bytes that differ from the exact model", num_differing, "at most", 0
    )


def mxfp8_blocks() -> list[Tensor]:
    """Random, tiny, huge, zero, subnormal, NaN and Inf blocks, [128, 256] each."""
    generator = torch.Generator().manual_seed(9)

    def random(scale: float) -> Tensor:
        return (torch.randn(128, 256, generator=generator) * scale).bfloat16()

    every_kind = random(1.0)
    every_kind[::7, ::37] = float("nan")
    every_kind[3::11, 5::41] = float("inf")
    every_kind[4::11, 6::41] = float("-inf")
    every_kind[64:96] = 0.0
    every_kind[96:112] *= -0.0
    bits = torch.randint(0, 2**16, (128, 256), generator=generator).to(torch.int32)
    any_bits = bits.to(torch.int16).view(torch.bfloat16)
    return [random(1.0), random(1e-30), random(1e-38), random(1e-41), random(1e37), every_kind, any_bits]


def near_bf16(workload: Workload, mxfp8: Workload) -> Iterator[Bar]:
    exact, result = run(workload, BASE), run(mxfp8, BASE)
    checks = check_passes(mxfp8, result)
    worst = max_of(*(check.ratio for check in checks.values()))
    yield Bar("MXFP8, error over that of torch with the same quantization points", worst, "at most", MAX_RATIO)
    cosines = [
        float(
            torch.cosine_similarity(*(torch.cat(r.gradients[name]).double().flatten() for r in (exact, result)), dim=0)
        )
        for name in exact.gradients
    ]
    yield Bar(
        "MXFP8, smallest cosine of a gradient to the BF16 one", -max_of(*(-c for c in cosines)), "at least", 0.996
    )


# ---- training ----


def training() -> Iterator[Bar]:
    example = load_example()
    in_bf16 = example.train(example.Options(num_steps=NUM_STEPS))
    split = example.train(example.Options(num_steps=NUM_STEPS, mode="split", is_evaluated=False))
    yield Bar(
        f"example, losses of split that differ from fused over {NUM_STEPS} steps",
        num_differing_losses(in_bf16.losses, split.losses),
        "at most",
        0,
    )
    in_mxfp8 = example.train(example.Options(num_steps=NUM_STEPS, precision="mxfp8"))
    yield Bar(
        f"example, held-out loss of MXFP8 away from BF16's after {NUM_STEPS} steps",
        abs(in_mxfp8.final_loss - in_bf16.final_loss),
        "at most",
        0.05,
        "nats a byte",
    )


def num_differing_losses(a: Sequence[float], b: Sequence[float]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def load_example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("train_tiny_moe")
