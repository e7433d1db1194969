"""A run of a workload on all ranks.

result = run_passes(LocalGroup(4), workload, MoKConfig(mode="split"))
checks = check_passes(workload, result)  # {"output": TensorCheck, "d_x": ...}; fine when every ratio <= MAX_RATIO
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mok_modular.protocol.config import MoKConfig
from mok_modular.testing.results import ForwardResult, PassesResult
from mok_modular.testing.run_rank import RankResult, merge, merge_passes, run_rank
from mok_modular.testing.workload import Workload


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

    def step(member: Any) -> dict[tuple[int, int], RankResult]:
        return {visit: run_rank(member, workload, configs[visit[0]]) for visit in visits}

    by_rank = _run_group(group, workload, step)
    return [merge([results[visit] for results in by_rank]) for visit in sorted(visits)]


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

    def step(member: Any) -> dict[tuple[int, int], RankResult]:
        options = {"has_backward": group.device == "cpu", "is_context_recomputed": is_context_recomputed}
        return {visit: run_rank(member, workload, configs[visit[0]], **options) for visit in visits}

    by_rank = _run_group(group, workload, step)
    return [merge_passes([results[visit] for results in by_rank]) for visit in sorted(visits)]


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
