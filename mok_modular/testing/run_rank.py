"""One rank's part of a run, and the results of all ranks put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mok_modular import functional
from mok_modular.calls.precision import pack_backward, pack_forward
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.roster import roster
from mok_modular.reference import LayerGradients
from mok_modular.testing.results import ForwardResult, PassesResult, StageStats
from mok_modular.testing.workload import Workload


@dataclass(frozen=True, eq=False)
class RankResult:
    """One forward of one rank, or both passes; times are points on the common clock."""

    output: Tensor
    gradients: dict[str, Tensor]
    stats: list[dict[str, Any]]
    schedule_start_s: float
    start_s: float
    end_s: float
    backward_start_s: float
    backward_end_s: float


def run_rank(
    member: Any,
    workload: Workload,
    config: MoKConfig,
    *,
    has_backward: bool = False,
    is_context_recomputed: bool = False,
) -> RankResult:
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
    return RankResult(output, gradients, stats, schedule_start_s, start_s, end_s, backward_start_s, backward_end_s)


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


def merge(ranks: Sequence[RankResult]) -> ForwardResult:
    start_s = min(rank.start_s for rank in ranks)
    return ForwardResult(
        outputs=[rank.output for rank in ranks],
        stages=_sum_stats([entry for rank in ranks for entry in rank.stats]),
        seconds=max(rank.end_s for rank in ranks) - start_s,
        schedule_seconds=max(rank.start_s for rank in ranks) - min(rank.schedule_start_s for rank in ranks),
    )


def merge_passes(ranks: Sequence[RankResult]) -> PassesResult:
    return PassesResult(
        **vars(merge(ranks)),
        gradients={name: [rank.gradients[name] for rank in ranks] for name in ranks[0].gradients},
        backward_seconds=max(rank.backward_end_s for rank in ranks) - min(rank.backward_start_s for rank in ranks),
    )


def _sum_stats(entries: Sequence[dict[str, Any]]) -> list[StageStats]:
    """One StageStats per (name, pass, kernel): the forward's in the order of tasks, then the backward's."""
    order = ("schedule", *roster().task_order)
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
    return sorted(sums.values(), key=lambda stage: (stage.pass_name == "backward", order.index(stage.name)))
