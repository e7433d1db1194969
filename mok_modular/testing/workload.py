"""One layer's inputs on every rank, a run of them, and the check of what comes out.

    workload = Workload.from_routing(load_routing(), shape, num_ranks=4, num_tokens=256)
    result = run_passes(LocalGroup(4), workload, MoKConfig(mode="split"))
    checks = check_passes(workload, result)  # {"output": TensorCheck, "d_x": ...}; fine when every ratio <= MAX_RATIO

Values come from seeded generators, one per rank (x) and per expert (weights): expert 5 has the same weights
whatever the number of ranks, and rank 1 the same x whatever the number of tokens of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_modular.config import MoEShape, MoKConfig
from mok_modular.precision import pack_backward, pack_forward
from mok_modular.reference import LayerGradients
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
    def random(cls, shape: MoEShape, seed: int, device: torch.device | str = "cpu") -> Weights:
        """Normal weights, scaled so that gate, up and down have outputs of about unit size. Made where they are to
        stand: other values on a GPU than on the CPU."""
        hidden, inter, num_experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
        sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
        routed = [torch.empty(num_experts, *size, dtype=torch.bfloat16, device=device) for size in sizes]
        for e in range(num_experts):  # one after the other: a layer's are tens of gigabytes
            for whole, part in zip(routed, _expert(hidden, inter, seed, 1 + e, device), strict=True):
                whole[e] = part
        if not shape.shared_intermediate_size:
            return cls(*routed)
        gate, up, down = routed
        return cls(gate, up, down, *_expert(hidden, shape.shared_intermediate_size, seed, 0, device))

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

    T may differ from rank to rank and may be 0. `weights` holds all E experts. `d_output` is the gradient of the output
    that backward runs are given, random if None. `precision` is that of the routed experts: a run in mxfp8 quantizes
    the weights, which are bfloat16 here.
    """

    shape: MoEShape
    x: list[Tensor]
    expert_ids: list[Tensor]
    router_weights: list[Tensor]
    weights: Weights
    swiglu_limit: float | None = None
    d_output: list[Tensor] | None = None
    precision: str = "bf16"

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
        """Random x and weights for given choices of every rank, on their device, and random router weights if none
        given.

        Raises ValueError if E is not divisible by the number of ranks, or an id tensor is not [T, K].
        """
        if not expert_ids or shape.num_experts % len(expert_ids) != 0:
            raise ValueError(
                f"num_experts must be divisible by the number of ranks, got {shape.num_experts} experts and "
                f"{len(expert_ids)} ranks"
            )
        xs, weights, device = [], [], expert_ids[0].device
        for rank, ids in enumerate(expert_ids):
            if ids.dim() != 2 or ids.shape[1] != shape.topk:
                raise ValueError(f"expert_ids of rank {rank} must be [T, {shape.topk}], got {list(ids.shape)}")
            generator = _generator(seed, 1_000_000 + rank, device)
            xs.append(torch.randn(len(ids), shape.hidden_size, generator=generator, device=device).bfloat16())
            weights.append(torch.rand(ids.shape, generator=generator, device=device))
        return cls(
            shape,
            xs,
            list(expert_ids),
            weights if router_weights is None else list(router_weights),
            Weights.random(shape, seed, device),
            swiglu_limit,
        )

    @classmethod
    def random(
        cls, shape: MoEShape, *, num_ranks: int, num_tokens: int, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Workload:
        """Every token chooses K different experts, all alike; made on `device`. Raises ValueError for K above E."""
        if shape.topk > shape.num_experts:
            raise ValueError(f"topk must be at most num_experts, got {shape.topk} and {shape.num_experts}")
        ids = []
        for rank in range(num_ranks):
            generator = _generator(seed, 1_500_000 + rank, device)
            chances = torch.rand(num_tokens, shape.num_experts, generator=generator, device=device)
            ids.append(chances.topk(shape.topk, dim=1).indices.int())
        return cls.from_ids(shape, ids, seed=seed)

    @classmethod
    def from_routing(
        cls,
        routing: Routing,
        shape: MoEShape,
        *,
        num_ranks: int,
        num_tokens: int | None,
        seed: int = 0,
    ) -> Workload:
        """Random x and weights for captured choices, `num_tokens` tokens a rank; None: as many as each captured rank
        had in the first capture.

        A rank replays the captures of one captured rank, one after the other. With more ranks than were
        captured, the surplus ranks go on where the earlier ones stopped, so no token is replayed twice.

        Raises ValueError if E or K of `shape` do not fit the routing, or it holds too few tokens.
        """
        _, num_captured_ranks, _, topk = routing.expert_ids.shape
        if shape.topk != topk:
            raise ValueError(f"topk of the shape must equal the routing's, got {shape.topk} and {topk}")
        if shape.num_experts < routing.num_experts:
            raise ValueError(
                f"num_experts of the shape must be at least the routing's, got {shape.num_experts} and "
                f"{routing.num_experts}"
            )
        if num_ranks < 1 or (num_tokens is not None and num_tokens < 0):
            raise ValueError(f"need at least 1 rank and 0 tokens, got {num_ranks} and {num_tokens}")
        num_rounds = math.ceil(num_ranks / num_captured_ranks)
        captured = [routing.of_rank(rank) for rank in range(num_captured_ranks)]
        wanted = [int(routing.num_tokens[0, r]) if num_tokens is None else num_tokens for r in range(len(captured))]
        places = []
        for rank, (ids, _) in enumerate(captured[:num_ranks]):
            if num_rounds * wanted[rank] > len(ids):
                raise ValueError(
                    f"{num_ranks} ranks of {wanted[rank]} tokens need {num_rounds * wanted[rank]} tokens of each "
                    f"captured rank; the routing holds {len(ids)} of rank {rank} of {num_captured_ranks}"
                )
        for rank in range(num_ranks):
            start, count = rank // num_captured_ranks * wanted[rank % len(captured)], wanted[rank % len(captured)]
            places.append((captured[rank % len(captured)], slice(start, start + count)))
        return cls.from_ids(
            shape,
            [ids[here].contiguous() for (ids, _), here in places],
            [weights[here].contiguous() for (_, weights), here in places],
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
        """Output of the reference by rank: in float64 the truth, in bfloat16 torch's own rounding (and in mxfp8 its
        quantization, at the library's places)."""
        from mok_modular import reference, reference_mxfp8

        if self.precision == "mxfp8" and dtype != torch.float64:
            return reference_mxfp8.moe_ranks(
                self.x,
                self.expert_ids,
                self.router_weights,
                self.weights.routed_gate,
                self.weights.routed_up,
                self.weights.routed_down,
                self.weights.shared_gate,
                self.weights.shared_up,
                self.weights.shared_down,
                self.swiglu_limit,
            )
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

    def d_outputs(self) -> list[Tensor]:
        """The gradient of the output [T, H] bfloat16, by rank."""
        if self.d_output is not None:
            return self.d_output
        sizes = [(len(x), self.shape.hidden_size) for x in self.x]
        return [torch.randn(size, generator=_generator(0, 2_000_000 + r)).bfloat16() for r, size in enumerate(sizes)]

    def reference_gradients(self, dtype: torch.dtype) -> dict[str, list[Tensor]]:
        """The gradients for `d_outputs`, by name (d_x, d_router_weights, d_routed_gate, ...) and rank: in float64 the
        truth, in bfloat16 torch's products at the library's rounding points (and in mxfp8 quantization points)."""
        from mok_modular import reference, reference_mxfp8

        is_quantized = self.precision == "mxfp8" and dtype != torch.float64
        layer_backward = reference_mxfp8.layer_backward if is_quantized else reference.layer_backward
        weights = self.weights.double() if dtype == torch.float64 else self.weights
        by_rank = layer_backward(
            [d_output.to(dtype) for d_output in self.d_outputs()],
            [x.to(dtype) for x in self.x],
            self.expert_ids,
            self.router_weights,
            weights.routed_gate,
            weights.routed_up,
            weights.routed_down,
            weights.shared_gate,
            weights.shared_up,
            weights.shared_down,
            self.swiglu_limit,
        )
        by_name = dict(zip(by_rank[0]._fields, zip(*by_rank, strict=True), strict=True))
        return {f"d_{name}": list(parts) for name, parts in by_name.items() if parts[0] is not None}


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


@dataclass(frozen=True, eq=False)
class PassesResult(ForwardResult):
    """The same of a forward and a backward; `gradients` by name (d_x, d_routed_gate, ...) and rank."""

    gradients: dict[str, list[Tensor]]
    backward_seconds: float

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """Output and gradients."""
        return {"output": self.outputs, **self.gradients}


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
    visits = _visits(len(configs), num_rounds)

    def step(member: Any) -> dict[tuple[int, int], _RankResult]:
        return {visit: _run_rank(member, workload, configs[visit[0]]) for visit in visits}

    by_rank = _run_group(group, workload, step)
    return [_merge([results[visit] for results in by_rank]) for visit in sorted(visits)]


def run_passes(
    group: Any, workload: Workload, config: MoKConfig, *, is_context_recomputed: bool = False
) -> PassesResult:
    """build_schedule, one forward and one backward, otherwise as run_forward. is_context_recomputed: the forward keeps
    no context."""
    return run_passes_plans(group, workload, [config], is_context_recomputed=is_context_recomputed)[0]


def run_passes_plans(
    group: Any,
    workload: Workload,
    configs: Sequence[MoKConfig],
    num_rounds: int = 1,
    *,
    is_context_recomputed: bool = False,
) -> list[PassesResult]:
    """As run_forward_plans, with a backward after every forward where the group's device has one: on the CPU."""
    visits = _visits(len(configs), num_rounds)

    def step(member: Any) -> dict[tuple[int, int], _RankResult]:
        options = {"has_backward": group.device == "cpu", "is_context_recomputed": is_context_recomputed}
        return {visit: _run_rank(member, workload, configs[visit[0]], **options) for visit in visits}

    by_rank = _run_group(group, workload, step)
    return [_merge_passes([results[visit] for results in by_rank]) for visit in sorted(visits)]


def _visits(num_configs: int, num_rounds: int) -> list[tuple[int, int]]:
    """(config, round) in the order of the calls."""
    visits = []
    for round_idx in range(num_rounds):
        order = range(num_configs) if round_idx % 2 == 0 else range(num_configs - 1, -1, -1)
        visits += [(config_idx, round_idx) for config_idx in order]
    return visits


def _run_group(group: Any, workload: Workload, step: Callable[[Any], Any]) -> list[Any]:
    if group.size() != workload.num_ranks:
        raise ValueError(f"the group has {group.size()} ranks but the workload is for {workload.num_ranks}")
    with torch.no_grad():  # it holds in the ranks too
        return group.run(step)


def check_forward(workload: Workload, result: ForwardResult) -> dict[str, TensorCheck]:
    """Compares the outputs of all ranks with the float64 reference and with torch's BF16 matmuls.

    Returns one entry per tensor (`output`). An error is 0 where both sides are zeros, NaN if an output is.
    """
    return check_tensors(workload, {"output": result.outputs})


def check_passes(workload: Workload, result: PassesResult) -> dict[str, TensorCheck]:
    """As check_forward, of the output and all gradients."""
    return check_tensors(workload, result.tensors)


def check_tensors(workload: Workload, by_name: Mapping[str, Sequence[Tensor]]) -> dict[str, TensorCheck]:
    """As check_forward, of tensors by name and rank: `output`, and the names of Workload.reference_gradients."""
    truth: dict[str, list[Tensor]] = {}
    rounded: dict[str, list[Tensor]] = {}
    for dtype, into in ((torch.float64, truth), (torch.bfloat16, rounded)):
        if "output" in by_name:
            into["output"] = workload.reference(dtype)
        if set(by_name) - {"output"}:
            into |= workload.reference_gradients(dtype)
    return {
        name: compare(torch.cat(list(parts)), torch.cat(rounded[name]), torch.cat(truth[name]))
        for name, parts in by_name.items()
    }


def compare(value: Tensor, rounded: Tensor, truth: Tensor) -> TensorCheck:
    """How far `value` is from `truth`, in units of how far `rounded` is."""
    error, torch_error = _distance(value, truth), _distance(rounded, truth)
    return TensorCheck(error, torch_error, _quotient(error, torch_error))


@dataclass(frozen=True, eq=False)
class _RankResult:
    """One forward of one rank, or both passes; times are points on the common clock."""

    output: Tensor
    gradients: dict[str, Tensor]
    stats: list[dict[str, Any]]
    schedule_start_s: float
    start_s: float
    end_s: float
    backward_start_s: float
    backward_end_s: float


def _run_rank(
    member: Any,
    workload: Workload,
    config: MoKConfig,
    *,
    has_backward: bool = False,
    is_context_recomputed: bool = False,
) -> _RankResult:
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
        timed: Any = workspace.shared
        timed.is_timing = True
    schedule_start_s = time.perf_counter()
    schedule = functional.build_schedule(
        workspace,
        config,
        workload.expert_ids[rank],
        num_local_experts=workload.shape.num_experts // num_ranks,
    )
    inputs = workload.x[rank], workload.router_weights[rank]
    shared = weights.shared_gate, weights.shared_up, weights.shared_down
    routed = weights.routed_gate, weights.routed_up, weights.routed_down
    arguments = (*inputs, *shared, *pack_forward(*routed, workload.precision), workload.swiglu_limit)
    if is_gpu:
        workspace.check()
    start_s = time.perf_counter()
    is_saved = has_backward and not is_context_recomputed
    output, context = functional.forward(config, workspace, schedule, *arguments, save_context=is_saved)
    if is_gpu:
        workspace.check()
    end_s = backward_start_s = backward_end_s = time.perf_counter()
    gradients: dict[str, Tensor] = {}
    if is_context_recomputed:
        w_gate, w_up, _ = pack_forward(*routed, workload.precision)
        context = functional.recompute_forward_context(
            config, workspace, schedule, inputs[0], *shared[:2], w_gate, w_up, workload.swiglu_limit
        )
    if has_backward:
        d_output = workload.d_outputs()[rank]
        arguments = (*inputs, *shared, *pack_backward(*routed, workload.precision), workload.swiglu_limit)
        backward_start_s = time.perf_counter()
        found = functional.backward(config, workspace, schedule, context, d_output, *arguments)
        backward_end_s = time.perf_counter()
        names = (f"d_{name}" for name in LayerGradients._fields)
        gradients = {name: part for name, part in zip(names, found, strict=True) if part is not None}
    stats = _gpu_stats(workspace, workload, config, schedule) if is_gpu else workspace.stage_stats()
    return _RankResult(output, gradients, stats, schedule_start_s, start_s, end_s, backward_start_s, backward_end_s)


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


def _merge_passes(ranks: Sequence[_RankResult]) -> PassesResult:
    return PassesResult(
        **vars(_merge(ranks)),
        gradients={name: [rank.gradients[name] for rank in ranks] for name in ranks[0].gradients},
        backward_seconds=max(rank.backward_end_s for rank in ranks) - min(rank.backward_start_s for rank in ranks),
    )


def _sum_stats(entries: Sequence[dict[str, Any]]) -> list[StageStats]:
    """One StageStats per (name, pass, kernel): the forward's in STAGE_ORDER, then the backward's."""
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
    return sorted(sums.values(), key=lambda stage: (stage.pass_name == "backward", STAGE_ORDER.index(stage.name)))


def _distance(value: Tensor, truth: Tensor) -> float:
    return _quotient(float((value.double() - truth).norm()), float(truth.norm()))


def _quotient(a: float, b: float) -> float:
    if b == 0:
        return a if a == 0 or math.isnan(a) else math.inf
    return a / b


def _generator(seed: int, stream: int, device: torch.device | str = "cpu") -> torch.Generator:
    # Any two (seed, stream) pairs of practical size give different seeds.
    return torch.Generator(device).manual_seed(seed * 2_000_003 + stream)


def _expert(
    hidden_size: int, width: int, seed: int, stream: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """gate [width, H], up [width, H], down [H, width] in bfloat16."""
    generator = _generator(seed, stream, device)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5).bfloat16()

    return matrix(width, hidden_size), matrix(width, hidden_size), matrix(hidden_size, width)
