"""Bars of the forward on CPU ranks: the same bits whatever runs, the error against float64, and speed.

Everything that must not change a bit is varied against one base run: the shipped capture on 4 ranks, a ring of
two slots, so that every rank goes through several generations.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from bar import Bar
from torch import Tensor

from mok_modular import LocalGroup, MoEShape, MoKConfig
from mok_modular.cli.common import parse_shape
from mok_modular.protocol.extension import extension
from mok_modular.protocol.plan import all_plans
from mok_modular.routing import load_routing
from mok_modular.testing import MAX_RATIO, ForwardResult, Workload, check_forward, run_forward, run_forward_plans

BASE = MoKConfig(minibatch_size=256, macrobatch_size=512)
NUM_ORDERS, NUM_QUICK_ORDERS = 200, 32

# H, I, E, K, S, ranks, largest T: sizes that are not powers of two, one and many experts a rank, K = 1.
ERROR_SHAPES = (
    (64, 64, 4, 1, 0, 1, 33),
    (192, 320, 12, 3, 64, 3, 97),
    (768, 256, 32, 6, 192, 4, 130),
    (2880, 192, 8, 4, 0, 2, 100),
    (512, 1024, 4, 2, 1024, 4, 160),
)


def bars(quick: bool) -> Iterator[Bar]:
    torch.set_num_threads(1)
    workload = captured_workload()
    base = torch.cat(run(workload, BASE).outputs)

    def num_differing(results: Iterable[ForwardResult]) -> int:
        return sum(not is_same(base, torch.cat(result.outputs)) for result in results)

    def bits(name: str, results: Iterable[ForwardResult]) -> Bar:
        return Bar(f"same bits: {name}", num_differing(results), "at most", 0, "differing runs")

    plans = [str(plan) for plan in all_plans()]
    num_orders = NUM_QUICK_ORDERS if quick else NUM_ORDERS
    yield bits("16 plans", (run(workload, config(mode=mode)) for mode in plans))
    yield bits(
        f"{num_orders} random orders, over all plans",
        (run(workload, config(mode=plans[seed % len(plans)]), order="random", seed=seed) for seed in range(num_orders)),
    )
    yield bits(
        "minibatch sizes",
        (run(workload, config(minibatch_size=rows, macrobatch_size=1024)) for rows in (128, 256, 512, 1024)),
    )
    yield bits(
        "macrobatch sizes",
        (run(workload, config(macrobatch_size=rows)) for rows in (256, 512, 768, 1024, 2048, 131072)),
    )
    yield bits(
        "worker counts, on fibers and threads",
        (
            run(workload, config(fwd_num_comm_sms=num_comm), executor=executor, num_workers=num_workers)
            for executor in ("fibers", "threads")
            for num_workers, num_comm in ((1, None), (2, 1), (3, None), (5, 3), (8, None))
        ),
    )
    yield bits(
        "row blocks 128 and 256",
        (run(workload, config(row_block=rows, mode=mode)) for rows in (128, 256) for mode in ("fused", "split")),
    )
    yield bits("R = 1, 2, 4", (run(on_ranks(workload, num_ranks), BASE) for num_ranks in (1, 2, 4)))
    worst = float(torch.tensor([error_ratio(*sizes) for sizes in ERROR_SHAPES]).max())  # of NaN and others: NaN
    yield Bar(f"error against float64 over torch's, worst of {len(ERROR_SHAPES)} shapes", worst, "at most", MAX_RATIO)
    if quick:
        return
    yield Bar("grouped GEMM on one core, 128 x 1024 x 1024", gemm_gflops(128, 1024, 1024), "at least", 10, "GFLOP/s")
    seconds, gflops = forward_speed(MoEShape("speed", 1024, 512, num_experts=16, topk=4), num_ranks=4, num_tokens=512)
    yield Bar("gate_up and down inside the layer, one core", gflops, "at least", 10, "GFLOP/s")
    yield Bar("fused forward, T 512 x 4 ranks, H 1024, I 512, E 16, K 4", seconds, "at most", 6, "s")


def config(**changes: Any) -> MoKConfig:
    """BASE with changes."""
    return dataclasses.replace(BASE, **changes)


def captured_workload() -> Workload:
    """The shipped routing on as many ranks as were captured, with the sizes of `mok-modular run`."""
    routing = load_routing()
    _, num_ranks, num_tokens, topk = routing.expert_ids.shape
    shape = parse_shape(None, num_experts=routing.num_experts, topk=topk)
    return Workload.from_routing(routing, shape, num_ranks=num_ranks, num_tokens=num_tokens)


def on_ranks(workload: Workload, num_ranks: int) -> Workload:
    """The same tokens in the same order, spread over another number of ranks."""

    def spread(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [part.contiguous() for part in torch.cat(list(tensors)).chunk(num_ranks)]

    return dataclasses.replace(
        workload,
        x=spread(workload.x),
        expert_ids=spread(workload.expert_ids),
        router_weights=spread(workload.router_weights),
        d_output=spread(workload.d_outputs()),
    )


def run(workload: Workload, config: MoKConfig, **group_options: Any) -> ForwardResult:
    return run_forward(LocalGroup(workload.num_ranks, **group_options), workload, config)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits agree (0.0 is not -0.0 here, and a NaN equals itself)."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def random_workload(shape: MoEShape, num_ranks: int, num_tokens: Sequence[int]) -> Workload:
    """Every token with K distinct experts, drawn evenly."""
    generator = torch.Generator().manual_seed(shape.hidden_size)
    ids = [
        torch.rand(tokens, shape.num_experts, generator=generator).topk(shape.topk, dim=1).indices.int()
        for tokens in num_tokens
    ]
    return Workload.from_ids(shape, ids)


def error_ratio(
    hidden_size: int, inter: int, num_experts: int, topk: int, shared: int, num_ranks: int, num_tokens: int
) -> float:
    shape = MoEShape("error", hidden_size, inter, num_experts, topk, shared)
    workload = random_workload(shape, num_ranks, [num_tokens - rank for rank in range(num_ranks)])
    return check_forward(workload, run(workload, BASE))["output"].ratio


def gemm_gflops(num_rows: int, num_cols: int, k: int, num_rounds: int = 40) -> float:
    """The host target's multiply of one row block: median over rounds after a warm-up."""
    a, b = torch.randn(num_rows, k).bfloat16(), torch.randn(num_cols, k).bfloat16()
    out = torch.empty(num_rows, num_cols, dtype=torch.bfloat16)
    seconds = []
    for _ in range(num_rounds + 1):
        start_s = time.perf_counter()
        extension().gemm(a.data_ptr(), b.data_ptr(), out.data_ptr(), num_rows, num_cols, k)
        seconds.append(time.perf_counter() - start_s)
    truth = a.double() @ b.double().T
    if not float((out.double() - truth).norm() / truth.norm()) < 0.01:  # a fast wrong answer is no answer
        return float("nan")
    return 2 * num_rows * num_cols * k / statistics.median(seconds[1:]) / 1e9


def forward_speed(shape: MoEShape, num_ranks: int, num_tokens: int, num_rounds: int = 5) -> tuple[float, float]:
    """Seconds of a fused forward with the default config, and GFLOP/s of its routed products inside their tiles;
    medians after a warm-up. Fibers share one OS thread, so this is one core."""
    workload = random_workload(shape, num_ranks, [num_tokens] * num_ranks)
    results = run_forward_plans(LocalGroup(num_ranks), workload, [MoKConfig()], num_rounds + 1)[1:]
    gflops = []
    for result in results:
        products = [stage for stage in result.stages if stage.name in ("gate_up", "down")]
        gflops.append(sum(s.flops for s in products) / sum(s.busy_s for s in products) / 1e9)
    return statistics.median(result.seconds for result in results), statistics.median(gflops)
