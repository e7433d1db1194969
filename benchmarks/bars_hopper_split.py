"""Bars of the split forward on one Hopper GPU: products, copies, the layer, bits, errors. Ratios within this run."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import gpu_timing
import torch
import torch_baseline
from bar import Bar
from torch import Tensor

from mok_modular import PRESETS, LocalGroup, MoEShape, MoKConfig, MoKTimeoutError, functional
from mok_modular.reference import moe

SHAPES = {name: shape for name, shape in PRESETS.items() if name != "tiny"}
SEGMENTS = ((8, 2048, 0.97), (16, 1024, 1.00), (32, 512, 1.05))
SPLIT = "split"
FUSED_EPILOGUE = "dispatch|gate_up+swiglu|down|combine"
LAYER_MODE = "dispatch|gate_up+swiglu|down|combine"
figures: dict[str, Any] = {}
"""Everything measured that is not a bar: milliseconds, rates, clocks."""


class Layer:
    """One layer on one GPU rank: weights, a workspace, and calls."""

    def __init__(
        self,
        shape: MoEShape,
        num_experts: int,
        topk: int,
        num_tokens: int,
        mode: str,
        seed: int = 0,
        weights: Layer | None = None,
        **options: Any,
    ) -> None:
        self.config = MoKConfig(mode=mode, **options)
        self.num_experts = num_experts
        self.member = LocalGroup(1, device="cuda:0").members[0]
        generator = torch.Generator("cuda").manual_seed(seed)

        def random(*dims: int) -> Tensor:
            return torch.randn(*dims, device="cuda", generator=generator, dtype=torch.bfloat16)

        hidden, inter = shape.hidden_size, shape.intermediate_size
        if weights is None:
            self.w_gate = random(num_experts, inter, hidden) / hidden**0.5
            self.w_up = random(num_experts, inter, hidden) / hidden**0.5
            self.w_down = random(num_experts, hidden, inter) / inter**0.5
        else:  # another layer's
            self.w_gate, self.w_up, self.w_down = weights.w_gate, weights.w_up, weights.w_down
        self.x = random(num_tokens, hidden)
        self.router_weights = torch.rand(num_tokens, topk, device="cuda", generator=generator)
        self.workspace = functional.create_workspace(
            self.config, self.member, num_local_tokens=num_tokens, hidden_size=hidden, topk=topk
        )

    def schedule(self, ids: Tensor) -> functional.MoKSchedule:
        return functional.build_schedule(self.workspace, self.config, ids, num_local_experts=self.num_experts)

    def forward(self, schedule: functional.MoKSchedule) -> Tensor:
        output, _ = functional.forward(
            self.config, self.workspace, schedule, self.x, self.router_weights, None, None, None,
            self.w_gate, self.w_up, self.w_down, save_context=False,
        )  # fmt: skip
        return output

    def kernel_ms(self, schedule: functional.MoKSchedule) -> dict[str, float]:
        """One forward with events around its kernels."""
        return self._timed_ms(lambda: self.forward(schedule))

    def schedule_ms(self, ids: Tensor) -> dict[str, float]:
        """One build_schedule with events around its kernel."""
        return self._timed_ms(lambda: self.schedule(ids))

    def _timed_ms(self, call: Callable[[], object]) -> dict[str, float]:
        shared: Any = self.workspace.shared
        shared.is_timing = True
        torch.cuda._sleep(2_000_000)  # about a millisecond: the host gets ahead, so that no gap of its is timed
        call()
        shared.is_timing = False
        return {kernel: seconds * 1e3 for kernel, seconds in shared.kernel_times_s()}


def bars(quick: bool) -> Iterator[Bar]:
    if not torch.cuda.is_available():
        raise SystemExit("hopper_split needs a GPU of compute capability 9.0")
    figures["copy_bytes_per_s"] = copy_rate = gpu_timing.copy_rate_bytes_per_s()
    figures["matmul_flops"] = gpu_timing.matmul_rate_flops()
    yield from bits_bars(50 if quick else 1000)
    yield from error_bars()
    yield from timeout_bars()
    yield from copy_bars(copy_rate)
    if quick:
        return
    yield from gemm_bars()
    yield from layer_bars()


# ---- products ----


def gemm_bars(rounds: int = 30) -> Iterator[Bar]:
    ratios, fused_ratios = [], []
    compiled_swiglu = torch.compile(torch_baseline.swiglu)
    for name, shape in SHAPES.items():
        for num_experts, rows, bar in SEGMENTS:
            result = one_gemm_case(shape, num_experts, rows, rounds, compiled_swiglu)
            figures[f"gemm {name} {num_experts}x{rows}"] = result
            for stage in ("gate_up", "down"):
                ratio = result[f"torch_{stage}_ms"] / result[f"{stage}_ms"]
                ratios.append(ratio)
                yield Bar(
                    f"grouped GEMM {name} {num_experts}x{rows} {stage}, torch time / time", ratio, "at least", bar
                )
            fused_ratios.append(result["torch_gate_up_swiglu_ms"] / result["gate_up_swiglu_ms"])
    yield Bar("grouped GEMM, geometric mean", geometric_mean(ratios), "at least", 1.05)
    yield Bar("gate_up+swiglu in one kernel, worst case", min(fused_ratios), "at least", 1.10)
    yield Bar("gate_up+swiglu in one kernel, geometric mean", geometric_mean(fused_ratios), "at least", 1.10)


def one_gemm_case(shape: MoEShape, num_experts: int, rows: int, rounds: int, compiled_swiglu: Any) -> dict[str, float]:
    num_tokens = num_experts * rows
    split = Layer(shape, num_experts, 1, num_tokens, SPLIT)
    ids = (torch.arange(num_tokens, device="cuda") % num_experts).view(-1, 1)
    ids = ids[torch.randperm(num_tokens, device="cuda")]
    schedule = split.schedule(ids)
    fused = Layer.__new__(Layer)
    fused.__dict__.update(split.__dict__)
    fused.config = MoKConfig(mode=FUSED_EPILOGUE)

    w_gate_up = torch.cat([split.w_gate, split.w_up], dim=1)  # [E, 2 I, H]
    ends = torch.arange(1, num_experts + 1, device="cuda", dtype=torch.int32) * rows
    sorted_x = split.x[torch.argsort(ids.view(-1), stable=True)]
    hidden = torch.randn(num_tokens, shape.intermediate_size, device="cuda", dtype=torch.bfloat16)
    layouts = {  # K contiguous, as ours, and N contiguous
        "k": (w_gate_up.transpose(1, 2), split.w_down.transpose(1, 2)),
        "n": (w_gate_up.transpose(1, 2).contiguous(), split.w_down.transpose(1, 2).contiguous()),
    }
    contenders: dict[str, Any] = {}
    for layout, (up, down) in layouts.items():
        contenders[f"gate_up {layout}"] = lambda up=up: torch_baseline.grouped(sorted_x, up, ends)
        contenders[f"down {layout}"] = lambda down=down: torch_baseline.grouped(hidden, down, ends)
        contenders[f"fused {layout}"] = lambda up=up: compiled_swiglu(torch_baseline.grouped(sorted_x, up, ends))
    # Every contender once a round and no pause in between: all of them meet the same clocks and power.
    contenders["split"] = lambda: split.forward(schedule)
    contenders["split, fused epilogue"] = lambda: fused.forward(schedule)
    shared: Any = split.workspace.shared
    for run in contenders.values():
        run()
    shared.is_timing = True
    median = gpu_timing.interleaved_ms(contenders, rounds=rounds, warmup=1)
    shared.is_timing = False
    times: dict[str, list[float]] = defaultdict(list)
    for kernel, seconds in shared.kernel_times_s():
        times[kernel].append(seconds * 1e3)
    median |= {f"ours {kernel}": statistics.median(values) for kernel, values in times.items()}
    return {
        "gate_up_ms": median["ours gate_up"],
        "down_ms": median["ours down"],
        "gate_up_swiglu_ms": median["ours gate_up+swiglu"],
        "torch_gate_up_ms": min(median["gate_up k"], median["gate_up n"]),
        "torch_down_ms": min(median["down k"], median["down n"]),
        "torch_gate_up_swiglu_ms": min(median["fused k"], median["fused n"]),
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# ---- copies ----


def copy_bars(copy_rate: float) -> Iterator[Bar]:
    """`unique` bytes: a row is read once from memory, however many routes read it again from the L2."""
    yield from copy_bars_of(2048, ("dispatch",), copy_rate)
    yield from copy_bars_of(8192, ("dispatch", "combine", "reduce"), copy_rate)


def copy_bars_of(num_tokens: int, stages: tuple[str, ...], copy_rate: float) -> Iterator[Bar]:
    shape, topk = SHAPES["kimi-k2.7"], 8
    layer = Layer(shape, 16, topk, num_tokens, LAYER_MODE)
    schedule = layer.schedule(random_ids(num_tokens, 16, topk))
    samples = [layer.kernel_ms(schedule) for _ in range(32)][2:]
    row = shape.hidden_size * 2
    num_bytes = {
        "dispatch": (num_tokens + num_tokens * topk) * row,  # a token's row is read once from memory, then from L2
        "combine": 2 * num_tokens * topk * row,
        "reduce": (num_tokens * topk + num_tokens) * row,
    }
    for stage in stages:
        count = num_bytes[stage]
        ms = statistics.median(sample[stage] for sample in samples)
        figures[f"{stage} Kimi T={num_tokens} ms"] = ms
        yield Bar(
            f"{stage} at R = 1, T = {num_tokens}, unique bytes / time over the copy rate",
            count / (ms * 1e-3) / copy_rate,
            "at least",
            0.85,
        )


def random_ids(num_tokens: int, num_experts: int, topk: int, seed: int = 1) -> Tensor:
    """Distinct experts a token, uniform."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(num_tokens, num_experts, device="cuda", generator=generator).topk(topk, dim=1).indices.int()


# ---- the layer ----


def layer_bars() -> Iterator[Bar]:
    compiled = torch.compile(torch_baseline.forward)
    for name, shape in SHAPES.items():
        for num_tokens in (2048, 8192):
            layer = Layer(shape, 16, shape.topk, num_tokens, LAYER_MODE)
            ids = random_ids(num_tokens, 16, shape.topk)
            w_gate_up = torch.cat([layer.w_gate, layer.w_up], dim=1).transpose(1, 2)
            w_down = layer.w_down.transpose(1, 2)
            arguments = (layer.x, ids, layer.router_weights, w_gate_up, w_down)
            times = gpu_timing.interleaved_ms(
                {
                    "split": lambda layer=layer, ids=ids: layer.forward(layer.schedule(ids)),
                    "eager": lambda arguments=arguments: torch_baseline.forward(*arguments),
                    "compiled": lambda arguments=arguments: compiled(*arguments),
                }
            )
            flops = 6 * num_tokens * shape.topk * shape.hidden_size * shape.intermediate_size
            times["floor"] = flops / figures["matmul_flops"] * 1e3
            schedule = layer.schedule(ids)
            samples = [layer.kernel_ms(schedule) for _ in range(10)]
            times["kernels"] = {k: statistics.median(s[k] for s in samples) for k in samples[0]}  # type: ignore[assignment]
            figures[f"layer {name} T={num_tokens} ms"] = times
            ratio = min(times["eager"], times["compiled"]) / times["split"]
            yield Bar(f"split forward {name} T={num_tokens}, best torch time / time", ratio, "at least", 1.0)


# ---- bits, errors, waits ----


class Small:
    """The same tokens on any number of ranks."""

    def __init__(self, num_experts: int, topk: int, hidden: int, inter: int, shared: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*dims: int) -> Tensor:
            return (torch.randn(*dims, generator=generator) / dims[-1] ** 0.5).bfloat16()

        self.num_experts, self.topk, self.hidden = num_experts, topk, hidden
        self.routed = (
            random(num_experts, inter, hidden),
            random(num_experts, inter, hidden),
            random(num_experts, hidden, inter),
        )
        self.shared = (
            (random(shared, hidden), random(shared, hidden), random(hidden, shared)) if shared else (None,) * 3
        )
        self.x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        self.ids = torch.randint(-1, num_experts, (num_tokens, topk), generator=generator)
        self.router_weights = torch.rand(num_tokens, topk, generator=generator)

    def run(self, num_ranks: int, config: MoKConfig, num_runs: int = 1, limit: float | None = None) -> list[Tensor]:
        """The outputs of all tokens, once a run."""
        num_tokens = len(self.x) // num_ranks
        local = self.num_experts // num_ranks

        def step(member: Any) -> list[Tensor]:
            rank = member.rank()
            part = slice(rank * num_tokens, (rank + 1) * num_tokens if rank + 1 < num_ranks else None)
            x, ids, router_weights = (t[part].cuda() for t in (self.x, self.ids, self.router_weights))
            routed = [w[rank * local : (rank + 1) * local].cuda() for w in self.routed]
            shared = [None if w is None else w.cuda() for w in self.shared]
            max_tokens = len(self.x) - num_tokens * (num_ranks - 1)
            workspace = functional.get_workspace(
                config, member, num_local_tokens=max_tokens, hidden_size=self.hidden, topk=self.topk
            )
            outputs = []
            for _ in range(num_runs):
                schedule = functional.build_schedule(workspace, config, ids, num_local_experts=local)
                output, _ = functional.forward(
                    config,
                    workspace,
                    schedule,
                    x,
                    router_weights,
                    *shared,
                    *routed,
                    swiglu_limit=limit,
                    save_context=False,
                )
                outputs.append(output)
            workspace.check()
            return outputs

        by_rank = LocalGroup(num_ranks, device="cuda:0").run(step)
        return [torch.cat([outputs[i] for outputs in by_rank]).cpu() for i in range(num_runs)]


def bits_bars(num_runs: int) -> Iterator[Bar]:
    small = Small(16, 4, 256, 384, 128, 1001)
    config = MoKConfig(mode=SPLIT, minibatch_size=256, macrobatch_size=512)
    base = small.run(1, config)[0].view(torch.int16)
    for num_ranks in (1, 2, 4, 8):
        outputs = small.run(num_ranks, config, num_runs)
        num_differing = sum(not torch.equal(output.view(torch.int16), base) for output in outputs)
        yield Bar(f"same bits: LocalGroup({num_ranks}), {num_runs} runs", num_differing, "at most", 0, "differing runs")


def error_bars() -> Iterator[Bar]:
    worst = 0.0
    for hidden, inter, topk, shared, limit in (
        (896, 256, 8, 256, None),  # the presets, an eighth as wide
        (768, 256, 8, 0, None),
        (512, 128, 10, 128, 1.0),
        (896, 384, 6, 0, 0.0 + 2.5),
        (2880, 640, 4, 64, None),
    ):
        small = Small(16, topk, hidden, inter, shared, 700)
        for num_ranks in (1, 4):
            output = small.run(num_ranks, MoKConfig(mode=SPLIT), limit=limit)[0]
            arguments = (small.ids, small.router_weights)
            exact = moe(small.x.double(), *arguments, *(w.double() for w in small.routed),
                        *(None if w is None else w.double() for w in small.shared), swiglu_limit=limit)  # fmt: skip
            rounded = moe(small.x, *arguments, *small.routed, *small.shared, swiglu_limit=limit)
            error = float((output.double() - exact).norm() / (rounded.double() - exact).norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
    yield Bar("output error against float64 over torch BF16's, worst case", worst, "at most", 1.5)


def timeout_bars(timeout_s: float = 1.0) -> Iterator[Bar]:
    """A `done` that was lost: the next call's publish waits for it in vain."""
    layer = Layer(MoEShape("small", 256, 384, 16, 4), 16, 4, 500, SPLIT)
    layer.config = MoKConfig(mode=SPLIT, timeout_s=timeout_s, start_timeout_s=timeout_s)
    ids = random_ids(500, 16, 4)
    good = layer.forward(layer.schedule(ids))
    schedule = layer.schedule(ids)
    shared: Any = layer.workspace.shared
    words = shared.region(0, "words", torch.int64)
    kept = words.clone()
    words[4:6] = 0  # done[2][R] of csrc/layout.h at R = 1
    begin = time.perf_counter()
    output = layer.forward(schedule)
    try:
        layer.workspace.check()
        took_s = math.inf
    except MoKTimeoutError as error:
        took_s = time.perf_counter() - begin
        figures["timeout message"] = str(error)
    yield Bar("a wait that expires: seconds until check() raises", took_s, "at most", timeout_s + 1.0, "s")
    yield Bar("a wait that expires: outputs that are not NaN", int((~output.isnan()).sum()), "at most", 0)
    del kept
    layer.workspace.reset()
    again = layer.forward(layer.schedule(ids))
    layer.workspace.check()
    differing = int((again.view(torch.int16) != good.view(torch.int16)).sum())
    yield Bar("a wait that expires: differing elements in the next call after reset", differing, "at most", 0)
