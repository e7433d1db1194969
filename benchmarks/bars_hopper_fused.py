"""Bars of the fused forward on one Hopper GPU: against the dense rate, torch and split; bits; host time; who wins.

Contenders of one comparison run back to back, once a round, a dense BF16 product among them: the chip is limited by
power, so a rate counts only beside the clocks that the others had. `floor`: a forward's FLOPs over that product's rate.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_timing
import torch
import torch_baseline
from bar import Bar
from bars_hopper_split import LAYER_MODE, SHAPES, Layer, Small, random_ids
from machine import clocks
from torch import Tensor

from mok_modular import MoEShape, MoKConfig
from mok_modular.protocol.plan import all_plans
from mok_modular.testing.timing import DENSE_FLOPS, dense_product

NUM_EXPERTS = 16
FLOOR_BARS = {2048: (0.80, 0.70), 8192: (0.85, 0.78)}  # T: the bar, and Qwen's
TORCH_BARS = {"kimi-k2.7": 1.4, "glm-5.2": 1.7, "qwen3.5-397b": 2.2, "deepseek-v4-pro": 1.5}
CROSSOVER_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_RING = {"minibatch_size": 256, "macrobatch_size": 512}
FULL_RING = {"minibatch_size": 256, "macrobatch_size": 131072}
COVERS = ("tests/multi/run.py",)
figures: dict[str, Any] = {}
"""Everything measured that is not a bar: milliseconds, rates, clocks."""


def bars(quick: bool) -> Iterator[Bar]:
    if not torch.cuda.is_available():
        raise SystemExit("hopper_fused needs a GPU of compute capability 9.0")
    figures["matmul_flops_alone"] = gpu_timing.matmul_rate_flops()
    if quick:
        yield from speed_bars(("kimi-k2.7",), (2048,))
        yield from bits_bars(50, 2)
        return
    yield from speed_bars(tuple(SHAPES), (2048, 8192))
    yield from host_bars()
    yield from trace_bars()
    yield from crossover_bars()
    yield from bits_bars(1000, 20)
    yield from process_bars()


# ---- bits ----


def bits_bars(num_runs: int, num_other_runs: int) -> Iterator[Bar]:
    small = Small(16, 4, 256, 384, 128, 1001)
    base = small.run(1, MoKConfig(mode="split", **SMALL_RING))[0].view(torch.int16)

    def differing(num_ranks: int, config: MoKConfig, count: int) -> int:
        outputs = small.run(num_ranks, config, count)
        return sum(not torch.equal(output.view(torch.int16), base) for output in outputs)

    for mode in ("fused", "split"):
        for num_ranks in (1, 4):
            number = differing(num_ranks, MoKConfig(mode=mode, **SMALL_RING), num_runs)
            yield Bar(
                f"same bits: {mode}, LocalGroup({num_ranks}), {num_runs} runs", number, "at most", 0, "differing runs"
            )
    for num_ranks in (1, 2, 4, 8):
        number = sum(
            differing(num_ranks, MoKConfig(mode=str(plan), **SMALL_RING), num_other_runs) for plan in all_plans()
        )
        name = f"same bits: 16 plans, LocalGroup({num_ranks}), {num_other_runs} runs each"
        yield Bar(name, number, "at most", 0, "differing runs")
    for options in (
        {"fwd_num_comm_sms": 8},
        {"fwd_num_comm_sms": 64},
        {"num_reserved_sms": 100},
        {"ring": "serial"},
        {"signal_grain": "minibatch"},
        {**FULL_RING, "dispatch": "push"},
        {**FULL_RING, "dispatch": "pull_once"},
        {**FULL_RING, "combine": "pull"},
        FULL_RING,
    ):
        config = MoKConfig(**{**SMALL_RING, **options})
        number = sum(differing(num_ranks, config, num_other_runs) for num_ranks in (1, 2, 4, 8))
        name = f"same bits: fused with {options}, LocalGroup(1, 2, 4, 8), {num_other_runs} runs each"
        yield Bar(name, number, "at most", 0, "differing runs")


# ---- speed ----


class Contenders:
    """One layer and one routing for all ways to compute it."""

    def __init__(self, shape: MoEShape, weights: Layer | None, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.split = Layer(shape, NUM_EXPERTS, shape.topk, num_tokens, LAYER_MODE, weights=weights)
        self.ids = random_ids(num_tokens, NUM_EXPERTS, shape.topk)
        self.flops = 6 * num_tokens * shape.topk * shape.hidden_size * shape.intermediate_size

    def with_config(self, **options: Any) -> Layer:
        """The same layer and workspace (or a new one, where the options change its layout)."""
        layer = Layer.__new__(Layer)
        layer.__dict__.update(self.split.__dict__)
        layer.config = MoKConfig(**options)
        return layer

    def torch_arguments(self) -> tuple[Tensor, ...]:
        w_gate_up = torch.cat([self.split.w_gate, self.split.w_up], dim=1).transpose(1, 2)
        return self.split.x, self.ids, self.split.router_weights, w_gate_up, self.split.w_down.transpose(1, 2)


def in_graph(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def torch_graph(arguments: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """The baseline as a CUDA graph; nothing where this torch cannot capture it."""
    try:
        return {"torch graph": in_graph(lambda: torch_baseline.forward(*arguments))}
    except RuntimeError as error:
        figures["torch graph"] = f"{error}"[:500]
        return {}


def speed_bars(names: Sequence[str], all_num_tokens: Sequence[int]) -> Iterator[Bar]:
    compiled = torch.compile(torch_baseline.forward, dynamic=False)
    dense = dense_product()
    for name in names:
        shape = SHAPES[name]
        weights: Layer | None = None
        for num_tokens in all_num_tokens:
            case = Contenders(shape, weights, num_tokens)
            weights = case.split
            fused, arguments = case.with_config(), case.torch_arguments()
            schedule = fused.schedule(case.ids)
            runs: dict[str, Callable[[], object]] = {
                "dense": dense,
                "fused": lambda fused=fused, schedule=schedule: fused.forward(schedule),
                "split": lambda case=case, schedule=schedule: case.split.forward(schedule),
                "schedule + fused": lambda fused=fused, case=case: fused.forward(fused.schedule(case.ids)),
                "schedule + fused, graph": in_graph(lambda fused=fused, c=case: fused.forward(fused.schedule(c.ids))),
                "torch eager": lambda arguments=arguments: torch_baseline.forward(*arguments),
                "torch compiled": lambda arguments=arguments: compiled(*arguments),
                **torch_graph(arguments),
            }
            if num_tokens == 8192:
                wide = Layer(shape, NUM_EXPERTS, shape.topk, num_tokens, "fused", weights=weights, minibatch_size=8192)
                wide_schedule = wide.schedule(case.ids)
                runs["fused, minibatch 8192"] = lambda f=wide, s=wide_schedule: f.forward(s)
            if num_tokens == 2048:
                for num_sms in (8, 16):
                    beside = case.with_config(fwd_num_comm_sms=num_sms)
                    runs[f"fused, {num_sms} communication SMs"] = lambda f=beside, s=schedule: f.forward(s)
            times: dict[str, Any] = gpu_timing.interleaved_ms(runs, rounds=15)
            dense_rate = DENSE_FLOPS / (times["dense"] * 1e-3)
            floor = case.flops / dense_rate * 1e3
            samples = [fused.kernel_ms(schedule) for _ in range(8)]
            kernels = {kernel: statistics.median(sample[kernel] for sample in samples) for kernel in samples[0]}
            figures[f"{name} T={num_tokens}"] = {
                "ms": times,
                "dense_flops": dense_rate,
                "floor_ms": floor,
                "floor_over_time_at_the_rate_of_dense_alone": case.flops
                / figures["matmul_flops_alone"]
                * 1e3
                / times["fused"],
                "kernels_alone_ms": kernels,
                "clocks": clocks(),
            }
            bar = FLOOR_BARS[num_tokens][name.startswith("qwen")]
            yield Bar(f"fused forward {name} T={num_tokens}, floor / time", floor / times["fused"], "at least", bar)
            best = min(ms for contender, ms in times.items() if contender.startswith("torch"))
            ratio = best / times["schedule + fused"]
            if num_tokens == 2048:
                title = f"schedule and fused forward {name} T=2048, best torch time / time"
                yield Bar(title, ratio, "at least", TORCH_BARS[name])
            else:
                figures[f"{name} T={num_tokens}"]["best_torch_over_fused"] = ratio
            wide = wide_schedule = None
            del case, fused, schedule, runs
            torch.cuda.empty_cache()


def host_bars(num_calls: int = 200) -> Iterator[Bar]:
    """Seconds that a call keeps the host, while nothing of the GPU's holds it up."""
    case = Contenders(SHAPES["kimi-k2.7"], None, 2048)
    fused = case.with_config()
    schedule = fused.schedule(case.ids)

    def host_ms(call: Callable[[], object]) -> float:
        times = []
        for i in range(num_calls):
            if i % 10 == 0:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[10:]) * 1e3

    for _ in range(10):
        fused.forward(fused.schedule(case.ids))
    forward_ms, schedule_ms = host_ms(lambda: fused.forward(schedule)), host_ms(lambda: fused.schedule(case.ids))
    kernel_ms = statistics.median(fused.kernel_ms(schedule)["fused"] for _ in range(10))
    figures["host ms"] = {"forward": forward_ms, "schedule": schedule_ms, "fused kernel": kernel_ms}
    yield Bar("host time of a forward over the fused kernel's, Kimi T=2048", forward_ms / kernel_ms, "at most", 0.1)
    yield Bar("host time of schedule and forward over it", (forward_ms + schedule_ms) / kernel_ms, "at most", 0.2)


def trace_bars(rounds: int = 30) -> Iterator[Bar]:
    """What a timeline from inside the kernels costs: the same forward with and without, once a round."""
    from mok_modular.targets.cuda import trace as cuda_trace

    case = Contenders(SHAPES["kimi-k2.7"], None, 2048)
    records, cuda_trace.NUM_RECORDS = cuda_trace.NUM_RECORDS, 1 << 23  # none is dropped: that would be another cost
    layers = {
        f"{mode}, trace {'on' if trace else 'off'}": case.with_config(mode=mode, trace=trace)
        for mode in ("fused", "split")
        for trace in (False, True)
    }
    schedule = layers["fused, trace off"].schedule(case.ids)
    workspace = case.split.workspace
    try:
        times = gpu_timing.interleaved_ms(
            {name: lambda layer=layer: layer.forward(schedule) for name, layer in layers.items()}, rounds=rounds
        )
        counts = workspace.shared._trace_buffer.counts.tolist()
        workspace.clear_trace()
        layers["fused, trace on"].forward(schedule)
        found = workspace.trace()
        kernels = {name: layer.kernel_ms(schedule) for name, layer in layers.items()}
    finally:
        cuda_trace.NUM_RECORDS = records
    figures["trace, Kimi T=2048"] = {
        "ms": times,
        "kernels_alone_ms": kernels,
        "records_taken_and_dropped": counts,
        "records_of_a_fused_forward": len(found.intervals),
        "smallest_coverage": min(found.coverage().values()),
        "overlaps": len(found.overlaps()),
        "ns": found.totals(),
    }
    for mode in ("fused", "split"):
        ratio = times[f"{mode}, trace on"] / times[f"{mode}, trace off"]
        figures["trace, Kimi T=2048"][f"{mode}, on / off"] = ratio
        if mode == "fused":
            yield Bar("fused forward Kimi T=2048, time with the trace hook on / off", ratio, "at most", 1.05)
    yield Bar("records dropped meanwhile", counts[1], "at most", 0)


def crossover_bars() -> Iterator[Bar]:
    """schedule + forward by number of tokens: who wins where."""
    for name, shape in SHAPES.items():
        weights: Layer | None = None
        rows: dict[int, dict[str, float]] = {}
        for num_tokens in CROSSOVER_TOKENS:
            case = Contenders(shape, weights, num_tokens)
            weights = case.split
            fused, arguments = case.with_config(), case.torch_arguments()
            rows[num_tokens] = gpu_timing.interleaved_ms(
                {
                    "fused": lambda fused=fused, case=case: fused.forward(fused.schedule(case.ids)),
                    "split": lambda case=case: case.split.forward(case.split.schedule(case.ids)),
                    "fused, graph": in_graph(lambda fused=fused, c=case: fused.forward(fused.schedule(c.ids))),
                    "split, graph": in_graph(lambda c=case: c.split.forward(c.split.schedule(c.ids))),
                    "torch eager": lambda arguments=arguments: torch_baseline.forward(*arguments),
                    **torch_graph(arguments),
                },
                rounds=15 if num_tokens <= 2048 else 7,
            )
            del case, fused, arguments
            torch.cuda.empty_cache()
        figures[f"crossover {name} ms"] = rows
        for num_tokens in (count for count in CROSSOVER_TOKENS if count >= 1024):
            times = rows[num_tokens]
            ratio = times["split"] / times["fused"]
            yield Bar(f"{name} T={num_tokens}, split time / fused time", ratio, "at least", 1.1)
            torch_ms = min(ms for contender, ms in times.items() if contender.startswith("torch"))
            yield Bar(f"{name} T={num_tokens}, torch time / split time", torch_ms / times["split"], "at least", 1.0)


def process_bars() -> Iterator[Bar]:
    """Ranks that are processes, on this GPU: all plans, 20 runs each."""
    script = Path(__file__).parents[1] / "tests" / "multi" / "run.py"
    for num_ranks in (1, 4) if importlib.util.find_spec("nvshmem") else ():
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
        command += [str(script), "--cases", "fused", "--bodies", "direct", "--repeats", "20"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            is_right, text = done.returncode == 0, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            is_right, text = False, f"{error}"
        figures[f"processes {num_ranks}"] = text[-2000:]
        name = f"same bits: 16 plans, {num_ranks} processes over NVSHMEM, 20 runs each"
        yield Bar(name, int(not is_right), "at most", 0, "failures")
