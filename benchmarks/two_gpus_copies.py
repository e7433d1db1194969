"""Dispatch and combine alone over NVLink, beside a plain copy; what it takes to hand a row over. One rank's side."""

from __future__ import annotations

import ctypes
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from two_gpus_cases import LAYERS, NUM_RANKS, Load, crossing, expert_ids
from two_gpus_contenders import Inputs

from mok_modular import MoEShape, MoKConfig, Workspace, functional
from mok_modular.targets.cuda import nvrtc
from mok_modular.targets.cuda.device import check, driver

KIMI = LAYERS["kimi-k2.7"]
LAYER = MoEShape("kimi rows", KIMI.hidden_size, 64, KIMI.num_experts, KIMI.topk)  # thin experts: only rows matter
NUM_TOKENS, ROW_BYTES = 2048, 2 * LAYER.hidden_size
NUM_SMS = {"remote": (4, 8, 16, 32, 64, 132), "uniform": (8, 16, 132), "captured": (8, 16, 132), "hot": (8, 16, 132)}
WAYS: dict[str, dict[str, str]] = {
    "pull dispatch, push combine": {},
    "push dispatch, pull combine": {"dispatch": "push", "combine": "pull"},
}
PULL_ONCE = {"pull once dispatch": {"dispatch": "pull_once"}}
ROUNDS, WARMUP = 7, 2
SIGNAL_MODES = {"word": 0, "pull": 1, "push": 2, "local": 3}
SIGNAL_ROUNDS = 2000


class Kernel:
    """A kernel of a .cu file beside this one."""

    def __init__(self, name: str) -> None:
        options = ["--gpu-architecture=sm_90a", "--std=c++20", "--device-as-default-execution-space"]
        cubin, _ = nvrtc.compile_source(Path(__file__).parent, f"{name}.cu", options)
        self.module = check(driver().cuModuleLoadData(cubin))
        self.function = check(driver().cuModuleGetFunction(self.module, name.encode()))

    def __call__(self, num_ctas: int, num_threads: int, *values: Any) -> None:
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver().cuLaunchKernel(
                self.function, num_ctas, 1, 1, num_threads, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            )
        )


class Stages:
    """Split forwards of rows that have thin experts, timed kernel by kernel."""

    def __init__(self, env: Any, options: dict[str, str], num_tokens: int) -> None:
        self.env, self.options = env, options
        self.workspace: Workspace = functional.create_workspace(
            self.config(132), env.group, device=env.device, num_local_tokens=num_tokens,
            hidden_size=LAYER.hidden_size, topk=LAYER.topk,
        )  # fmt: skip

    def config(self, num_sms: int) -> MoKConfig:
        return MoKConfig(mode="split", macrobatch_size=131072, num_reserved_sms=132 - num_sms, **self.options)

    def kernel_ms(self, inputs: Inputs, num_sms: int, rounds: int) -> dict[str, float]:
        """Medians by kernel, the slowest rank's. The ranks' kernels meet in the schedule, so that no rank's dispatch
        waits for a host that is late."""
        config, shared = self.config(num_sms), self.workspace.shared
        times: dict[str, list[float]] = defaultdict(list)
        shared.is_timing = True
        for _ in range(rounds):
            self.workspace.check()
            self.env.start(4_000_000)  # a host that records events needs 1 ms; behind it, ranks would drift apart
            schedule = functional.build_schedule(
                self.workspace, config, inputs.ids32, num_local_experts=inputs.num_local_experts
            )
            functional.forward(
                config, self.workspace, schedule, inputs.x, inputs.router_weights, None, None, None,
                inputs.w_gate, inputs.w_up, inputs.w_down, save_context=False,
            )  # fmt: skip
            for kernel, seconds in shared.kernel_times_s():
                times[kernel].append(seconds * 1e3)
        shared.is_timing = False
        return self.env.slowest({kernel: statistics.median(values[WARMUP:]) for kernel, values in times.items()})


def measure_copies(env: Any, routings: Sequence[str]) -> None:
    """`copies`: milliseconds and GB/s by routing, direction and number of SMs, and of plain loads and stores.

    link: bytes that cross in the busier direction over the time. logical: bytes of all rows of the busiest rank.
    """
    weights: Inputs | None = None
    for way, options in (WAYS | PULL_ONCE).items():
        stages = Stages(env, options, NUM_TOKENS)
        if not options and "remote" in routings:
            _measure_plain(env, stages.workspace)
        for routing in routings:
            all_ids = [expert_ids(LAYER, NUM_TOKENS, routing, rank) for rank in range(NUM_RANKS)]
            load = Load.of(all_ids, LAYER.num_experts)
            inputs = Inputs.random(LAYER, all_ids[env.rank], NUM_RANKS, env.rank, env.device, weights)
            weights = inputs
            for num_sms in NUM_SMS[routing]:
                times = stages.kernel_ms(inputs, num_sms, ROUNDS)
                for kernel, name in zip(("dispatch", "combine"), way.split(", "), strict=False):
                    num_crossing = crossing(load.unique if way in PULL_ONCE else load.rows)
                    figures = rates(times[kernel], num_crossing, load.max_received())
                    env.save("copies", f"{routing}: {name}, {num_sms} SMs", figures)
        del stages


def rates(ms: float, num_crossing: int, num_rows: int) -> dict[str, float]:
    """The figures of one copy."""
    return {
        "ms": ms,
        "link_gb_per_s": num_crossing * ROW_BYTES / ms * 1e-6,
        "logical_gb_per_s": num_rows * ROW_BYTES / ms * 1e-6,
    }


def _measure_plain(env: Any, workspace: Workspace) -> None:
    """As many bytes as all-remote dispatch moves, both directions at once; leaves the workspace reset."""
    kernel, memory, rank = Kernel("peer_copy"), workspace.shared.native, env.rank
    num_rows = NUM_TOKENS * LAYER.topk
    peer = memory.address(1 - rank, "combine")
    scratch = torch.empty(num_rows * ROW_BYTES, dtype=torch.uint8, device=env.device)
    count = ctypes.c_longlong(num_rows * ROW_BYTES // 16)
    for name, dst, src in (("loads", scratch.data_ptr(), peer), ("stores", peer, scratch.data_ptr())):
        for num_sms in NUM_SMS["remote"]:
            arguments = (ctypes.c_void_p(dst), ctypes.c_void_p(src), count)
            runs = {"copy": lambda n=num_sms, a=arguments: kernel(2 * n, 512, *a)}
            figures = rates(env.slowest(env.medians(runs, ROUNDS, WARMUP))["copy"], num_rows, num_rows)
            env.save("copies", f"remote: plain {name}, {num_sms} SMs", figures)
    torch.cuda.synchronize()
    workspace.reset()  # its regions hold anything now


def measure_signals(env: Any) -> None:
    """`signals`: microseconds of a hand-over (signal_rounds.cu), and of the kernels of forwards of few rows.

    A hand-over goes from the writer's first store of a row of 14 KB to the reader's having checked it. Behind pull
    dispatch the owner wrote the row itself: `local`. Behind push dispatch another GPU did: `push`.
    """
    for way, options in WAYS.items():
        stages = Stages(env, options, 128)
        if not options:
            _measure_rounds(env, stages.workspace)
        weights: Inputs | None = None
        for num_tokens in (1, 128):
            ids = expert_ids(LAYER, num_tokens, "remote", env.rank)
            weights = inputs = Inputs.random(LAYER, ids, NUM_RANKS, env.rank, env.device, weights)
            times = stages.kernel_ms(inputs, 132, 20)
            kernels = {kernel: 1e3 * ms for kernel, ms in times.items()}
            env.save("signals", f"kernels, {num_tokens} tokens a rank: {way}", kernels)
        del stages


def _measure_rounds(env: Any, workspace: Workspace) -> None:
    kernel, memory, rank = Kernel("signal_rounds"), workspace.shared.native, env.rank
    region = workspace.shared.region(rank, "combine", torch.int64)
    at = [memory.address(each, "combine") for each in range(NUM_RANKS)]
    scratch = torch.zeros(1 << 20, dtype=torch.uint8, device=env.device)
    result = torch.zeros(2, dtype=torch.int64, device=env.device)
    for name, mode in SIGNAL_MODES.items():
        for num_rounds in (100, SIGNAL_ROUNDS):  # the first is for warmth
            env.meet()  # the other GPU reads nothing here any more
            region[: 1 << 14].zero_()
            scratch.zero_()
            torch.cuda.synchronize()
            env.meet()
            if mode == 3:
                base = scratch.data_ptr()
                words, rows, num_ctas = [base, base + 256], [base + (1 << 16), base + (2 << 16)], 2
            else:
                words, rows, num_ctas = at, [address + (1 << 16) for address in at], 1
            pointers = [ctypes.c_void_p(address) for address in (*words, *rows)]
            sink = ctypes.c_void_p(scratch.data_ptr() + (4 << 16))
            sizes = [ctypes.c_int(value) for value in (mode, rank, num_rounds, ROW_BYTES // 16)]
            arguments = (*sizes, *pointers, sink, ctypes.c_void_p(result.data_ptr()))
            ms = env.medians({name: lambda n=num_ctas, a=arguments: kernel(n, 256, *a)}, 1, 0)[name]
        wrong, expired = result.tolist()
        if wrong or expired:
            raise RuntimeError(f"signal_rounds, {name}: {wrong} wrong elements, expired: {expired}")
        env.save("signals", f"hand-over, {name}", {"us": env.slowest({name: ms})[name] * 1e3 / SIGNAL_ROUNDS})
    torch.cuda.synchronize()
    env.meet()
    workspace.reset()
