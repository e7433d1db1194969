"""Forwards of one workload under several configs on a GPU, timed in one interleaved run, and whether their bits agree.

found = time_forwards(LocalGroup(1, device="cuda:0"), workload, {"fused": MoKConfig(), "split": MoKConfig("split")})
found.by_name["split"].forward_ms / found.by_name["fused"].forward_ms
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mok_modular import functional
from mok_modular.calls.workspace import layout_key
from mok_modular.protocol.config import MoKConfig
from mok_modular.testing.timing import DENSE_FLOPS, dense_product, host_ms, interleaved_ms, run_rounds, sm_clock_mhz
from mok_modular.testing.workload import Workload

CHECKED_ROUNDS = 3
"""Rounds whose bits are compared: two that warm up, and one behind the timed ones."""

DENSE, BOTH = "dense product", "schedule and "


@dataclass(frozen=True)
class TimedForward:
    """One config. `forward_ms`: functional.forward alone, with a schedule that is there; `with_schedule_ms`: after
    build_schedule; `host_ms`: how long the two keep the host. Bits are compared with those of the first config."""

    forward_ms: float
    with_schedule_ms: float
    host_ms: float
    is_same: bool

    @property
    def is_host_bound(self) -> bool:
        """The GPU waited for the host, as a rule, so it is the host that was timed."""
        return self.host_ms > 0.8 * self.with_schedule_ms


@dataclass(frozen=True)
class TimedRun:
    """One interleaved run. `dense_flops`: the rate of a dense BF16 product that was one of the contenders, FLOP/s, None
    where it was not; `sm_clock_mhz`: the clock at the end, None where nobody tells."""

    by_name: dict[str, TimedForward]
    dense_flops: float | None
    sm_clock_mhz: int | None


class _Calls:
    """One rank's calls under all configs. Configs with the same layout share a workspace."""

    def __init__(self, member: Any, workload: Workload, configs: Mapping[str, MoKConfig]) -> None:
        self.rank, self.workload, self.configs = member.rank(), workload, configs
        self.num_local_experts = workload.shape.num_experts // member.size()
        weights = workload.weights.of_rank(self.rank, member.size())
        shared = weights.shared_gate, weights.shared_up, weights.shared_down
        self.weights = (*shared, weights.routed_gate, weights.routed_up, weights.routed_down)
        by_layout = {layout_key(config): config for config in configs.values()}
        by_key = {
            key: functional.create_workspace(
                config,
                member,
                num_local_tokens=max(len(x) for x in workload.x),
                hidden_size=workload.shape.hidden_size,
                topk=workload.shape.topk,
            )
            for key, config in by_layout.items()
        }
        self.workspaces = {name: by_key[layout_key(config)] for name, config in configs.items()}

    def schedule(self, name: str) -> functional.MoKSchedule:
        return functional.build_schedule(
            self.workspaces[name],
            self.configs[name],
            self.workload.expert_ids[self.rank],
            num_local_experts=self.num_local_experts,
        )

    def forward(self, name: str, schedule: functional.MoKSchedule) -> Tensor:
        inputs = self.workload.x[self.rank], self.workload.router_weights[self.rank]
        arguments = (*inputs, *self.weights, self.workload.swiglu_limit)
        config, workspace = self.configs[name], self.workspaces[name]
        return functional.forward(config, workspace, schedule, *arguments, save_context=False)[0]

    def both(self, name: str) -> Tensor:
        return self.forward(name, self.schedule(name))

    def contenders(self) -> dict[str, Callable[[], object]]:
        """First all forwards alone, then all with their schedules."""
        schedules = {name: self.schedule(name) for name in self.configs}
        alone = {name: partial(self.forward, name, schedule) for name, schedule in schedules.items()}
        return {**alone, **{BOTH + name: partial(self.both, name) for name in self.configs}}

    def check(self) -> None:
        for workspace in self.workspaces.values():
            workspace.check()


def time_forwards(
    group: Any, workload: Workload, configs: Mapping[str, MoKConfig], *, rounds: int = 15, has_dense: bool = False
) -> TimedRun:
    """Runs `configs` on the ranks of a LocalGroup on a GPU, where the workload is too. Workspaces are created once and
    gone at the end.

    Raises ValueError if the group has another size, and whatever the library raises.
    """
    if group.size() != workload.num_ranks:
        raise ValueError(f"the group has {group.size()} ranks but the workload is for {workload.num_ranks}")
    device = torch.device(group.device)

    def step(member: Any) -> tuple[dict[str, bool], dict[str, float], dict[str, float], int | None]:
        with torch.cuda.device(device):  # a thread begins on the first one
            calls = _Calls(member, workload, configs)
            base: Tensor | None = None
            is_same = dict.fromkeys(configs, True)

            def compare() -> None:
                nonlocal base
                for name in configs:
                    output = calls.both(name)
                    base = output if base is None else base
                    is_same[name] &= torch.equal(output.view(torch.int16), base.view(torch.int16))
                calls.check()

            for _ in range(CHECKED_ROUNDS - 1):
                compare()
            is_timed = member.rank() == 0  # all ranks run in one grid: one of them has the clock
            contenders = calls.contenders()
            if has_dense:  # first, and only one rank's: the others are held up until it has called
                contenders = {DENSE: dense_product(device) if is_timed else lambda: None, **contenders}
            ms: dict[str, float] = {}
            clocks: list[int | None] = []
            if is_timed:
                ms = interleaved_ms(contenders, rounds, 1, at_end=lambda: clocks.append(sm_clock_mhz(device)))
            else:
                run_rounds(contenders, rounds + 1)
            host = host_ms({name: run for name, run in contenders.items() if name.startswith(BOTH)})
            compare()
            return is_same, ms, host, clocks[0] if clocks else None

    with torch.no_grad():
        results = group.run(step)
    _, ms, host, clock = results[0]
    by_name = {
        name: TimedForward(ms[name], ms[BOTH + name], host[BOTH + name], all(is_same[name] for is_same, *_ in results))
        for name in configs
    }
    return TimedRun(by_name, DENSE_FLOPS / (ms[DENSE] * 1e-3) if has_dense else None, clock)
