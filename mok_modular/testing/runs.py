"""A run of a workload on all ranks, and the check of what comes out.

result = run_passes(LocalGroup(4), workload, MoKConfig(mode="split"))
checks = check_passes(workload, result)  # {"output": TensorCheck, "d_x": ...}; fine when every ratio <= MAX_RATIO
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular import functional
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.diagnosis import TASK_ORDER
from mok_modular.reference import LayerGradients
from mok_modular.testing.workload import Workload

MAX_RATIO = 1.5
"""How much further than torch's BF16 matmuls, at the same rounding points, an output may be from float64."""

STAGE_ORDER = ("schedule", *TASK_ORDER)
"""The order in which stages are shown."""


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
    launches = [(each.kernel, each.stages) for each in config.plan.launches(1, shared > 0)]
    for kernel, names in [("schedule", ("schedule",)), *launches]:
        for i, name in enumerate(names):
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
