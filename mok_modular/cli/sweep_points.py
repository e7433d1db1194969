"""One forward over a grid of choices: on CPU ranks what it moves, how long it takes in logical steps and how long
workers stand idle; on a GPU how long it takes.

rows = sweep(workload, {"plan": ["fused", "split"], "workers": [2, 4]})
timing = time_points(workload, {"plan": ["fused", "split"], "comm_sms": [0, 8]}, LocalGroup(1, device="cuda:0"))
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mok_modular.protocol.config import DEFAULT_ROW_BLOCK, MoKConfig
from mok_modular.ranks.group import LocalGroup
from mok_modular.testing import Workload, run_forward

AXES = {
    "plan": str,
    "tokens": int,
    "minibatch": int,
    "macrobatch": int,
    "grain": str,
    "direction": str,
    "ring": str,
    "workers": int,
    "comm_sms": int,
    "imbalance": float,
}
"""What can be varied. tokens: the first of each rank; direction: pull (dispatch pulls, combine pushes), pull_once, or
push (the other way round); workers: of a CPU rank; comm_sms: SMs of a GPU that do nothing but communicate, 0 for none
(warps between the products do it); imbalance: the share of routes that go to expert 0 instead of their own."""

CPU_ONLY, GPU_ONLY = ("workers",), ("comm_sms",)
INPUTS = ("tokens", "imbalance")
"""Axes that change what is computed, and not only how."""


def check_axes(axes: Mapping[str, Sequence[Any]], *, is_gpu: bool) -> None:
    """Raises ValueError for an axis or a value that there is not, or not there."""
    for name in axes:
        if name not in AXES:
            raise ValueError(f"axes are {', '.join(AXES)}; got {name!r}")
        if name in CPU_ONLY and is_gpu:
            raise ValueError(f"axis {name} is for CPU ranks; on a GPU vary {', '.join(GPU_ONLY)}")
        if name in GPU_ONLY and not is_gpu:
            raise ValueError(f"axis {name} is for a GPU; on CPU ranks vary {', '.join(CPU_ONLY)}")
        if len(set(axes[name])) < len(axes[name]) or not axes[name]:
            raise ValueError(f"axis {name} needs values, each once; got {list(axes[name])}")
    for value in axes.get("tokens", ()):
        if value < 1:
            raise ValueError(f"tokens must be at least 1, got {value}")
    for value in axes.get("comm_sms", ()):
        if value < 0:
            raise ValueError(f"comm_sms must be at least 0, got {value}")
    for value in axes.get("imbalance", ()):
        check_share(value)
    for chosen in _points(axes):
        config_of(chosen)


def sweep(workload: Workload, axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A row a combination, in the order of the axes: their values, then `num_bytes` (moved or read by stages), `steps`
    (of the forward), `work`, `wait` and `idle` (worker steps: in tiles, at waits, and what is left of all workers'
    time), and `over_first`, steps over those of the first row. On CPU ranks.

    Raises ValueError for an axis or a value that there is not.
    """
    check_axes(axes, is_gpu=False)
    rows: list[dict[str, Any]] = []
    for chosen in _points(axes):
        rows.append({**chosen, **_count(workload, chosen)})
        rows[-1]["over_first"] = round(rows[-1]["steps"] / rows[0]["steps"], 3)
    return rows


def _points(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def config_of(chosen: Mapping[str, Any], *, trace: bool = False) -> MoKConfig:
    """The config of a point. Raises ValueError for values that do not go together."""
    direction = chosen.get("direction", "pull")
    if direction not in ("pull", "pull_once", "push"):
        raise ValueError(f"direction must be pull, pull_once or push, got {direction!r}")
    for name in ("minibatch", "macrobatch"):
        if chosen.get(name, DEFAULT_ROW_BLOCK) < 1 or chosen.get(name, 0) % DEFAULT_ROW_BLOCK:
            raise ValueError(f"{name} must be a multiple of the row block ({DEFAULT_ROW_BLOCK}), got {chosen[name]}")
    macrobatch = chosen.get("macrobatch", 131072)
    minibatch = chosen.get("minibatch", _default_minibatch(macrobatch))
    if macrobatch % minibatch:
        raise ValueError(f"macrobatch must be a multiple of minibatch ({minibatch}), got {macrobatch}")
    return MoKConfig(
        mode=chosen.get("plan", "fused"),
        minibatch_size=minibatch,
        macrobatch_size=macrobatch,
        signal_grain=chosen.get("grain", "row_block"),
        ring=chosen.get("ring", "interleaved"),
        dispatch=direction,
        combine="pull" if direction == "push" else "push",
        fwd_num_comm_sms=chosen.get("comm_sms") or None,
        trace=trace,
    )


def _default_minibatch(macrobatch: int) -> int:
    """The largest that divides `macrobatch`, of at most 4096 rows."""
    num_blocks = macrobatch // DEFAULT_ROW_BLOCK
    return DEFAULT_ROW_BLOCK * max(i for i in range(1, 4096 // DEFAULT_ROW_BLOCK + 1) if num_blocks % i == 0)


def _count(workload: Workload, chosen: Mapping[str, Any]) -> dict[str, Any]:
    group = LocalGroup(workload.num_ranks, num_workers=chosen.get("workers"))
    result = run_forward(group, inputs_of(workload, chosen), config_of(chosen, trace=True))
    trace = next(iter(group.workspaces.values())).trace()
    mine = [each for each in trace.intervals if trace.calls[each.call] == "forward"]
    begin, end = min(each.begin for each in mine), max(each.end for each in mine)
    work = sum(each.end - each.begin for each in mine if each.kind != "wait")
    wait = sum(each.end - each.begin for each in mine if each.kind == "wait" and each.edge != "tickets")
    num_tracks = len({each.track for each in mine})
    return {
        "num_bytes": sum(stage.num_bytes for stage in result.stages),
        "steps": end - begin,
        "work": work,
        "wait": wait,
        "idle": num_tracks * (end - begin) - work - wait,
    }


# ---- inputs ----


def inputs_of(workload: Workload, chosen: Mapping[str, Any]) -> Workload:
    """The part of the workload that a point works on, with its imbalance. Weights are shared, and x is not copied."""
    return skewed(shortened(workload, chosen.get("tokens")), chosen.get("imbalance", 0.0))


def shortened(workload: Workload, num_tokens: int | None) -> Workload:
    """The first tokens of every rank. Raises ValueError where a rank has fewer."""
    if num_tokens is None:
        return workload
    if min(len(x) for x in workload.x) < num_tokens:
        raise ValueError(f"tokens is {num_tokens}, but the ranks have {[len(x) for x in workload.x]}")
    return dataclasses.replace(
        workload,
        x=[part[:num_tokens] for part in workload.x],
        expert_ids=[part[:num_tokens] for part in workload.expert_ids],
        router_weights=[part[:num_tokens] for part in workload.router_weights],
        d_output=None,
    )


def check_share(share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"imbalance must be 0 to 1, got {share}")


def skewed(workload: Workload, share: float) -> Workload:
    """The same workload with a share of its routes sent to expert 0. Raises ValueError unless it is 0 to 1."""
    check_share(share)
    if share == 0:
        return workload
    ids = []
    for each in workload.expert_ids:
        steps = torch.arange(each.numel() + 1, dtype=torch.float64, device=each.device).mul(share).floor()
        is_moved = steps.diff().gt(0).view(each.shape)
        ids.append(each.masked_fill(is_moved & (each >= 0), 0))
    return dataclasses.replace(workload, expert_ids=ids)


# ---- on a GPU ----


@dataclass(frozen=True)
class Timing:
    """What `time_points` found: a row a point, a dict for each interleaved run (`run`, `dense_flops`, `sm_clock_mhz`
    and the axes that all its points share), and the GPU (`name`, `driver`)."""

    rows: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    device: dict[str, str | None]


def time_points(
    workload: Workload,
    axes: Mapping[str, Sequence[Any]],
    group: LocalGroup,
    *,
    rounds: int = 15,
    tell: Callable[[str], object] = lambda _: None,
) -> Timing:
    """Times one BF16 forward a point on the ranks of a LocalGroup on a GPU, where the workload is too.

    Points with the same tokens and imbalance are one interleaved run, a dense BF16 product among them: each once a
    round. A row has the point's values, `forward_ms`, `with_schedule_ms` (both medians), `floor_ms` (the forward's
    FLOPs at the rate of the dense product of its run), `floor_over_time` (of the forward alone), `over_first` (over the
    first point of its run), `host_ms`, `is_host_bound` (it is the host that was timed), `bits_identical` (to the first
    point of its run), and `run`, which one it was. A run creates its workspaces once, one a memory layout, and frees
    them.

    Raises ValueError, before anything is timed, for axes, values or memory that do not fit.
    """
    from mok_modular.testing.timed_forward import time_forwards
    from mok_modular.testing.timing import describe_gpu

    check_axes(axes, is_gpu=True)
    points = _points(axes)
    by_inputs: dict[tuple[Any, ...], list[int]] = {}
    for i, chosen in enumerate(points):
        by_inputs.setdefault(tuple(chosen.get(name) for name in INPUTS), []).append(i)
    for members in by_inputs.values():
        _check_fits(inputs_of(workload, points[members[0]]), [config_of(points[i]) for i in members], group.device)

    rows: list[dict[str, Any]] = [{} for _ in points]
    runs: list[dict[str, Any]] = []
    for run_idx, members in enumerate(by_inputs.values()):
        shared = {name: points[members[0]][name] for name in INPUTS if name in axes}
        tell(f"run {run_idx + 1} of {len(by_inputs)}: {len(members)} points {shared or ''}".rstrip())
        inputs = inputs_of(workload, points[members[0]])
        configs = {str(i): config_of(points[i]) for i in members}
        found = time_forwards(group, inputs, configs, rounds=rounds, has_dense=True)
        assert found.dense_flops is not None
        floor_ms = num_flops(inputs) / found.dense_flops * 1e3
        first_ms = found.by_name[str(members[0])].forward_ms
        for i in members:
            timed = found.by_name[str(i)]
            rows[i] = {
                **points[i],
                "forward_ms": timed.forward_ms,
                "with_schedule_ms": timed.with_schedule_ms,
                "floor_ms": floor_ms,
                "floor_over_time": floor_ms / timed.forward_ms,
                "over_first": timed.forward_ms / first_ms,
                "host_ms": timed.host_ms,
                "is_host_bound": timed.is_host_bound,
                "bits_identical": timed.is_same,
                "run": run_idx,
            }
        runs.append({"run": run_idx, **shared, "dense_flops": found.dense_flops, "sm_clock_mhz": found.sm_clock_mhz})
        gc.collect()  # the workspaces of this run, gigabytes as a rule
        torch.cuda.empty_cache()
    return Timing(rows, runs, describe_gpu(group.device))


def num_flops(workload: Workload) -> int:
    """Of a forward's products: those of routes that exist, and the shared expert's, on all ranks."""
    shape = workload.shape
    num_routes = sum(int((ids >= 0).sum()) for ids in workload.expert_ids)
    num_tokens = sum(len(x) for x in workload.x)
    widths = num_routes * shape.intermediate_size + num_tokens * shape.shared_intermediate_size
    return 6 * shape.hidden_size * widths


def _check_fits(workload: Workload, configs: Sequence[MoKConfig], device: str) -> None:
    """Raises ValueError where a ring is too small for its config, or the memory for all workspaces of the run."""
    from mok_modular.calls.checks import check_ring
    from mok_modular.calls.workspace import layout_key
    from mok_modular.memory import estimate
    from mok_modular.protocol.sizes import Sizes

    shape, num_ranks = workload.shape, workload.num_ranks
    num_tokens = max(len(x) for x in workload.x)
    num_local_experts = shape.num_experts // num_ranks
    num_bytes = 0
    for config in {layout_key(config): config for config in configs}.values():
        sizes = Sizes(config, num_ranks, num_tokens, shape.hidden_size, shape.topk)
        capacity_rows = sizes.capacity_rows(num_local_experts)
        check_ring(config, sizes.shape(num_local_experts, capacity_rows, 64, 0, False))
        memory = estimate(shape, config, num_ranks=num_ranks, num_tokens=num_tokens, has_backward=False)
        num_bytes += num_ranks * (memory.workspace + memory.schedule)
    num_free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    num_free -= torch.cuda.memory_allocated(device)
    if num_bytes > num_free:
        raise ValueError(
            f"the points with {num_tokens} tokens need {num_bytes / 1e9:.1f} GB of workspaces at the same time, and "
            f"{num_free / 1e9:.1f} GB are free on {device}: give fewer sizes of minibatch and macrobatch, grains or "
            "directions at once"
        )
