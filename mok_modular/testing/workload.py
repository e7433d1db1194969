"""One layer's inputs on every rank, a forward run of them, and the check of its output.

    workload = Workload.from_routing(load_routing(), shape, num_ranks=4, num_tokens=256)
    result = run_forward(LocalGroup(4), workload, MoKConfig(mode="split"))
    checks = check_forward(workload, result)  # {"output": TensorCheck}; fine when every ratio <= MAX_RATIO

Values come from seeded generators, one per rank (x) and per expert (weights): expert 5 has the same weights
whatever the number of ranks, and rank 1 the same x whatever the number of tokens of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_modular.config import MoEShape, MoKConfig
from mok_modular.routing import Routing
from mok_modular.targets.host import TASK_ORDER

MAX_RATIO = 1.5
"""How much further than torch's BF16 matmuls, at the same rounding points, an output may be from float64."""

STAGE_ORDER = ("schedule", *TASK_ORDER)
"""The order in which stages are shown."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights in bfloat16. routed_gate and routed_up [E, I, H], routed_down [E, H, I]; shared_gate and
    shared_up [S, H], shared_down [H, S], None without a shared expert."""

    routed_gate: Tensor
    routed_up: Tensor
    routed_down: Tensor
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None

    @classmethod
    def random(cls, shape: MoEShape, seed: int) -> Weights:
        """Normal weights, scaled so that gate, up and down have outputs of about unit size."""
        hidden, inter = shape.hidden_size, shape.intermediate_size
        experts = [_expert(hidden, inter, seed, 1 + e) for e in range(shape.num_experts)]
        gate, up, down = (torch.stack(parts) for parts in zip(*experts, strict=True))
        if not shape.shared_intermediate_size:
            return cls(gate, up, down)
        return cls(gate, up, down, *_expert(hidden, shape.shared_intermediate_size, seed, 0))

    def of_rank(self, rank: int, num_ranks: int) -> Weights:
        """The same with only the experts of `rank`."""
        num_local = len(self.routed_gate) // num_ranks
        mine = slice(rank * num_local, (rank + 1) * num_local)
        return replace(
            self,
            routed_gate=self.routed_gate[mine],
            routed_up=self.routed_up[mine],
            routed_down=self.routed_down[mine],
        )

    def double(self) -> Weights:
        """The same in float64."""
        return Weights(*(None if w is None else w.double() for w in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Workload:
    """Inputs of one layer, lists by rank: x [T, H] bfloat16, expert_ids [T, K], router_weights [T, K] f32.

    T may differ from rank to rank and may be 0. `weights` holds all E experts.
    """

    shape: MoEShape
    x: list[Tensor]
    expert_ids: list[Tensor]
    router_weights: list[Tensor]
    weights: Weights
    swiglu_limit: float | None = None

    @classmethod
    def from_ids(
        cls,
        shape: MoEShape,
        expert_ids: Sequence[Tensor],
        router_weights: Sequence[Tensor] | None = None,
        *,
        seed: int = 0,
        swiglu_limit: float | None = None,
    ) -> Workload:
        """Random x and weights for given choices of every rank, and random router weights if none given.

        Raises ValueError if E is not divisible by the number of ranks, or an id tensor is not [T, K].
        """
        if not expert_ids or shape.num_experts % len(expert_ids) != 0:
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got {shape.num_experts} experts and "
                f"{len(expert_ids)} ranks"
            )
        xs, weights = [], []
        for rank, ids in enumerate(expert_ids):
            if ids.dim() != 2 or ids.shape[1] != shape.topk:
                raise ValueError(f"expert_ids of rank {rank} must be [T, {shape.topk}], got {list(ids.shape)}")
            generator = _generator(seed, 1_000_000 + rank)
            xs.append(torch.randn(len(ids), shape.hidden_size, generator=generator).bfloat16())
            weights.append(torch.rand(ids.shape, generator=generator))
        return cls(
            shape,
            xs,
            list(expert_ids),
            weights if router_weights is None else list(router_weights),
            Weights.random(shape, seed),
            swiglu_limit,
        )

    @classmethod
    def from_routing(
        cls,
        routing: Routing,
        shape: MoEShape,
        *,
        num_ranks: int,
        num_tokens: int,
        seed: int = 0,
    ) -> Workload:
        """Random x and weights for captured choices, `num_tokens` tokens a rank.

        A rank replays the captures of one captured rank, one after the other. With more ranks than were
        captured, the surplus ranks go on where the earlier ones stopped, so no token is replayed twice.

        Raises ValueError if E or K of `shape` do not fit the routing, or it holds too few tokens.
        """
        num_captures, num_captured_ranks, num_captured_tokens, topk = routing.expert_ids.shape
        if shape.topk != topk:
            raise ValueError(f"topk of the shape must equal the routing's, got {shape.topk} and {topk}")
        if shape.num_experts < routing.num_experts:
            raise ValueError(
                f"num_experts of the shape must be at least the routing's, got {shape.num_experts} and "
                f"{routing.num_experts}"
            )
        if num_ranks < 1 or num_tokens < 0:
            raise ValueError(f"need at least 1 rank and 0 tokens, got {num_ranks} and {num_tokens}")
        num_available = num_captures * num_captured_tokens
        num_rounds = math.ceil(num_ranks / num_captured_ranks)
        if num_rounds * num_tokens > num_available:
            raise ValueError(
                f"{num_ranks} ranks of {num_tokens} tokens need {num_rounds * num_tokens} tokens of each "
                f"captured rank; the routing holds {num_available} for each of {num_captured_ranks}"
            )
        ids = routing.expert_ids.transpose(0, 1).flatten(1, 2)
        weights = routing.router_weights.transpose(0, 1).flatten(1, 2)
        places = []
        for rank in range(num_ranks):
            start = rank // num_captured_ranks * num_tokens
            places.append((rank % num_captured_ranks, slice(start, start + num_tokens)))
        return cls.from_ids(
            shape,
            [ids[place].contiguous() for place in places],
            [weights[place].contiguous() for place in places],
            seed=seed,
        )

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    def to(self, device: str | torch.device) -> Workload:
        """The same on a device."""

        def move(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensor.to(device) for tensor in tensors]

        weights = Weights(*(None if w is None else w.to(device) for w in vars(self.weights).values()))  # type: ignore[arg-type]
        return replace(
            self,
            x=move(self.x),
            expert_ids=move(self.expert_ids),
            router_weights=move(self.router_weights),
            weights=weights,
        )

    def reference(self, dtype: torch.dtype) -> list[Tensor]:
        """Output of the reference by rank: in float64 the truth, in bfloat16 torch's own rounding."""
        from mok_modular import reference

        weights = self.weights.double() if dtype == torch.float64 else self.weights
        out = reference.moe(
            torch.cat(self.x).to(dtype),
            torch.cat(self.expert_ids),
            torch.cat(self.router_weights),
            weights.routed_gate,
            weights.routed_up,
            weights.routed_down,
            weights.shared_gate,
            weights.shared_up,
            weights.shared_down,
            swiglu_limit=self.swiglu_limit,
        )
        return list(out.split([len(x) for x in self.x]))


@dataclass(frozen=True)
class StageStats:
    """What one stage did, summed over ranks and launches: `busy_s` in tiles, `wait_s` suspended at waits."""

    name: str
    pass_name: str
    kernel: str
    num_rows: int
    num_bytes: int
    flops: int
    busy_s: float
    wait_s: float

    def to_json(self) -> dict[str, Any]:
        """The same as a dict, `pass_name` under the key `pass`."""
        return {("pass" if key == "pass_name" else key): value for key, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """Outputs by rank, the stages, and times from the first rank's start to the last one's end."""

    outputs: list[Tensor]
    stages: list[StageStats]
    seconds: float
    """functional.forward alone."""
    schedule_seconds: float
    """functional.build_schedule, which ran just before."""


@dataclass(frozen=True)
class TensorCheck:
    """Relative 2-norm distances from float64: the library's, torch's in bfloat16, and their quotient."""

    error: float
    torch_error: float
    ratio: float

    @property
    def is_ok(self) -> bool:
        """False for NaN too."""
        return self.ratio <= MAX_RATIO


def run_forward(group: Any, workload: Workload, config: MoKConfig) -> ForwardResult:
    """build_schedule and one forward on every rank of `group`, a LocalGroup of workload.num_ranks ranks.

    Raises ValueError if the group has another size, and whatever the library raises.
    """
    return run_forward_plans(group, workload, [config])[0]


def run_forward_plans(
    group: Any, workload: Workload, configs: Sequence[MoKConfig], num_rounds: int = 1
) -> list[ForwardResult]:
    """`num_rounds` rounds of one forward per config, in one run of `group`; every other round goes backwards,
    so that neither end of the list always comes first. Results by config, then by round.

    Raises ValueError if the group has another size, and whatever the library raises.
    """
    if group.size() != workload.num_ranks:
        raise ValueError(f"the group has {group.size()} ranks but the workload is for {workload.num_ranks}")
    visits = []
    for round_idx in range(num_rounds):
        order = range(len(configs)) if round_idx % 2 == 0 else range(len(configs) - 1, -1, -1)
        visits += [(config_idx, round_idx) for config_idx in order]

    def step(member: Any) -> dict[tuple[int, int], _RankResult]:
        with torch.no_grad():
            return {visit: _run_rank(member, workload, configs[visit[0]]) for visit in visits}

    by_rank = group.run(step)
    return [
        _merge([results[config_idx, round_idx] for results in by_rank])
        for config_idx in range(len(configs))
        for round_idx in range(num_rounds)
    ]


def check_forward(workload: Workload, result: ForwardResult) -> dict[str, TensorCheck]:
    """Compares the outputs of all ranks with the float64 reference and with torch's BF16 matmuls.

    Returns one entry per tensor (`output`). An error is 0 where both sides are zeros, NaN if an output is.
    """
    truth = torch.cat(workload.reference(torch.float64))
    error = _distance(torch.cat(result.outputs), truth)
    torch_error = _distance(torch.cat(workload.reference(torch.bfloat16)), truth)
    return {"output": TensorCheck(error, torch_error, _quotient(error, torch_error))}


@dataclass(frozen=True, eq=False)
class _RankResult:
    """One forward of one rank; times are points on the common clock."""

    output: Tensor
    stats: list[dict[str, Any]]
    schedule_start_s: float
    start_s: float
    end_s: float


def _run_rank(member: Any, workload: Workload, config: MoKConfig) -> _RankResult:
    from mok_modular import functional

    rank, num_ranks = member.rank(), member.size()
    weights = workload.weights.of_rank(rank, num_ranks)
    workspace = functional.get_workspace(
        config,
        member,
        num_local_tokens=max(len(x) for x in workload.x),
        hidden_size=workload.shape.hidden_size,
        topk=workload.shape.topk,
    )
    workspace.clear_stage_stats()
    is_gpu = workspace.device.type == "cuda"
    if is_gpu:
        shared: Any = workspace.shared
        shared.is_timing = True
    schedule_start_s = time.perf_counter()
    schedule = functional.build_schedule(
        workspace,
        config,
        workload.expert_ids[rank],
        num_local_experts=workload.shape.num_experts // num_ranks,
    )
    if is_gpu:
        workspace.check()
    start_s = time.perf_counter()
    output, _ = functional.forward(
        config,
        workspace,
        schedule,
        workload.x[rank],
        workload.router_weights[rank],
        weights.shared_gate,
        weights.shared_up,
        weights.shared_down,
        weights.routed_gate,
        weights.routed_up,
        weights.routed_down,
        swiglu_limit=workload.swiglu_limit,
        save_context=False,
    )
    if is_gpu:
        workspace.check()
    end_s = time.perf_counter()
    stats = _gpu_stats(workspace, workload, config, schedule) if is_gpu else workspace.stage_stats()
    return _RankResult(output, stats, schedule_start_s, start_s, end_s)


def _gpu_stats(workspace: Any, workload: Workload, config: MoKConfig, schedule: Any) -> list[dict[str, Any]]:
    """What the stages of a call did, with the seconds of their kernels. A kernel serves all ranks: they are rank 0's.

    Rows, bytes and FLOPs are counted here: each operand once. A stage in another one's epilogue has no time of its own.
    """
    shape, rank = workload.shape, workspace.member.rank()
    num_tokens, topk = workload.expert_ids[rank].shape
    seconds: dict[str, float] = {}
    if rank == 0:
        for kernel, time_s in workspace.shared.kernel_times_s():
            seconds[kernel] = seconds.get(kernel, 0.0) + time_s
        workspace.shared.is_timing = False
    rows, experts = int(schedule.segment_num_rows.sum()), int((schedule.segment_num_rows > 0).sum())
    routes = int((schedule.route_rank >= 0).sum())
    hidden, inter, shared = shape.hidden_size, shape.intermediate_size, shape.shared_intermediate_size
    shared_flops = 2 * num_tokens * shared * hidden
    work = {  # rows, elements of BF16, FLOPs
        "schedule": (num_tokens * topk, 0, 0),
        "publish": (num_tokens, 2 * num_tokens * hidden, 0),
        "shared_gate_up": (num_tokens, num_tokens * (hidden + shared) + 2 * shared * hidden, 2 * shared_flops),
        "shared_down": (num_tokens, num_tokens * (hidden + shared) + shared * hidden, shared_flops),
        "dispatch": (rows, 2 * rows * hidden, 0),
        "gate_up": (rows, rows * (hidden + 2 * inter) + 2 * experts * inter * hidden, 4 * rows * inter * hidden),
        "swiglu": (rows, 3 * rows * inter, 0),
        "down": (rows, rows * (hidden + inter) + experts * inter * hidden, 2 * rows * inter * hidden),
        "combine": (rows, 2 * rows * hidden, 0),
        "reduce": (num_tokens, (routes + num_tokens) * hidden, 2 * routes * hidden),
    }  # fmt: skip
    stats = []
    for kernel in ["schedule", *(each.kernel for each in config.plan.launches(1, shared > 0))]:
        for i, name in enumerate(kernel.split("+")):
            num_rows, elements, flops = work[name]
            stats.append(
                {
                    "name": name,
                    "pass": "forward",
                    "kernel": kernel,
                    "num_rows": num_rows,
                    "num_bytes": 2 * elements,
                    "flops": flops,
                    "busy_s": seconds.get(kernel, 0.0) if i == 0 else 0.0,
                    "wait_s": 0.0,
                }
            )
    return stats


def _merge(ranks: Sequence[_RankResult]) -> ForwardResult:
    start_s = min(rank.start_s for rank in ranks)
    return ForwardResult(
        outputs=[rank.output for rank in ranks],
        stages=_sum_stats([entry for rank in ranks for entry in rank.stats]),
        seconds=max(rank.end_s for rank in ranks) - start_s,
        schedule_seconds=max(rank.start_s for rank in ranks) - min(rank.schedule_start_s for rank in ranks),
    )


def _sum_stats(entries: Sequence[dict[str, Any]]) -> list[StageStats]:
    """One StageStats per (name, pass, kernel), in STAGE_ORDER."""
    sums: dict[tuple[str, str, str], StageStats] = {}
    for entry in entries:
        key = (entry["name"], entry["pass"], entry["kernel"])
        old = sums.get(key, StageStats(*key, 0, 0, 0, 0.0, 0.0))
        sums[key] = StageStats(
            *key,
            old.num_rows + int(entry["num_rows"]),
            old.num_bytes + int(entry["num_bytes"]),
            old.flops + int(entry["flops"]),
            old.busy_s + float(entry["busy_s"]),
            old.wait_s + float(entry["wait_s"]),
        )
    return sorted(sums.values(), key=lambda stage: STAGE_ORDER.index(stage.name))


def _distance(value: Tensor, truth: Tensor) -> float:
    return _quotient(float((value.double() - truth).norm()), float(truth.norm()))


def _quotient(a: float, b: float) -> float:
    if b == 0:
        return a if a == 0 or math.isnan(a) else math.inf
    return a / b


def _generator(seed: int, stream: int) -> torch.Generator:
    # Any two (seed, stream) pairs of practical size give different seeds.
    return torch.Generator().manual_seed(seed * 2_000_003 + stream)


def _expert(hidden_size: int, width: int, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate [width, H], up [width, H], down [H, width] in bfloat16."""
    generator = _generator(seed, stream)
    gate, up = ((torch.randn(width, hidden_size, generator=generator) * hidden_size**-0.5).bfloat16() for _ in range(2))
    down = (torch.randn(hidden_size, width, generator=generator) * width**-0.5).bfloat16()
    return gate, up, down
