"""Which of the five fusible stages share a kernel, and the launches that follow from it.

A plan cuts the data flow dispatch -> gate_up -> swiglu -> down -> combine at any of its four seams, so there
are 16. `split` cuts at all of them, `fused` at none; `dispatch|gate_up+swiglu|down+combine` lies between. All
16 give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from mok_modular.protocol.roster import STAGES, roster

_RULE = f"'fused', 'split', or {', '.join(STAGES)} in this order, each once, joined by '|' (cut) or '+' (same kernel)"

Stream = Literal["comm", "compute"]


@dataclass(frozen=True)
class Launch:
    """One kernel launch of one rank.

    `generation` counts passes through the ring in launch order, from 0; None where the launch is not per
    generation. Forward visits macrobatches from last to first, so generation g works on macrobatch
    `num_generations - 1 - g`.
    """

    kernel: str
    stages: tuple[str, ...]
    generation: int | None
    stream: Stream


@dataclass(frozen=True)
class Plan:
    """Groups of stages that share a kernel: contiguous and in data-flow order.

    Raises ValueError if the groups are not the five stages, each once, in order.
    """

    groups: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        _check_groups(self.groups, given="|".join("+".join(group) for group in self.groups))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads `fused`, `split` or a plan string; spaces around stage names do not count.

        Raises TypeError if `text` is not a string, ValueError with the offending part and the rule otherwise.
        """
        if not isinstance(text, str):
            raise TypeError(f"plan must be a str, got {type(text).__name__}")
        word = text.strip()
        if word == "fused":
            return cls((STAGES,))
        if word == "split":
            return cls(tuple((stage,) for stage in STAGES))
        groups = tuple(tuple(stage.strip() for stage in group.split("+")) for group in word.split("|"))
        _check_groups(groups, given=text)
        return cls(groups)

    def __str__(self) -> str:
        if self.is_fused:
            return "fused"
        if self.is_split:
            return "split"
        return "|".join("+".join(group) for group in self.groups)

    @property
    def is_fused(self) -> bool:
        """All five stages in one kernel."""
        return len(self.groups) == 1

    @property
    def is_split(self) -> bool:
        """Every stage a kernel of its own."""
        return len(self.groups) == len(STAGES)

    @property
    def group_masks(self) -> tuple[int, ...]:
        """One bit mask a group, in data-flow order; bit i stands for STAGES[i]."""
        return tuple(group_mask(group) for group in self.groups)

    @property
    def backward_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of a backward's stages that mirror the plan, in data-flow order."""
        mirror = roster().mirror
        return tuple(tuple(mirror[stage] for stage in reversed(group)) for group in reversed(self.groups))

    @property
    def replay_groups(self) -> tuple[tuple[str, ...], ...]:
        """The kernels of a replay: dispatch and gate_up, together where the plan has them together."""
        groups = (tuple(stage for stage in group if stage in roster().replayed) for group in self.groups)
        return tuple(group for group in groups if group)

    def launches(self, num_generations: int, has_shared: bool) -> list[Launch]:
        """The kernel launches of one forward call on one rank, in launch order.

        publish, the shared expert's kernels, then the groups once per generation, then reduce. In the fused
        plan publish, the shared expert and all generations are tasks of the one kernel.
        Raises ValueError if `num_generations` is not at least 1: a rank without rows has one (surplus)
        generation.
        """
        if num_generations < 1:
            raise ValueError(f"num_generations must be at least 1, got {num_generations}")
        shared = roster().names("prologue", "forward") if has_shared else ()
        ending = roster().names("windowed", "forward_end")
        reduce = Launch("reduce", ("reduce",), None, "compute")
        if self.is_fused:
            return [Launch("fused", ("publish", *shared, *STAGES, *ending), None, "compute"), reduce]
        first = [Launch(stage, (stage,), None, _stream((stage,))) for stage in ("publish", *shared)]
        windows = [
            Launch("+".join(group), group, generation, _stream(group))
            for generation in range(num_generations)
            for group in (*self.groups, *((stage,) for stage in ending))
        ]
        return [*first, *windows, reduce]

    def recompute_launches(self, has_shared: bool) -> list[Launch]:
        """The kernel launches of a recomputation: what a replay runs, for macrobatch 0; reduce ends the call."""
        first = ("publish", "shared_gate_up") if has_shared else ("publish",)
        return [
            *(Launch(stage, (stage,), None, _stream((stage,))) for stage in first),
            *(Launch("+".join(group), group, 0, _stream(group)) for group in self.replay_groups),
            Launch("reduce", ("reduce",), None, "compute"),
        ]

    def backward_launches(
        self,
        num_generations: int,
        has_shared: bool,
        *,
        has_dgrad: bool = True,
        has_wgrad: bool = True,
        is_mxfp8: bool = False,
    ) -> list[Launch]:
        """The kernel launches of a backward call, or of one half of it, on one rank, in launch order.

        publish, the shared expert's kernels, then per generation (macrobatches ascend) the replay of what the context
        does not hold, the groups that mirror the plan and the weight gradients; then reduce. Weight gradients are a
        kernel of their own, last in the generation: down's need what swiglu_backward leaves. In MXFP8 the quantization
        of what they multiply is another, before them. In the fused plan all but reduce are tasks of one kernel.
        """
        dgrad = roster().names("prologue", "backward") if has_shared and has_dgrad else ()
        wgrad = roster().names("prologue", "wgrad") if has_shared and has_wgrad else ()
        ending = roster().names("windowed", "wgrad")
        reduce = Launch("reduce", ("reduce",), None, "compute")
        if self.is_fused and has_dgrad:  # without weight gradients it is the same kernel, which then has no such tasks
            windowed = roster().names("windowed", "replayed", "backward", "wgrad")
            stages = ("publish", *dgrad, *wgrad, *windowed)
            return [Launch("fused", stages, None, "compute"), reduce]
        first = [Launch(stage, (stage,), None, _stream((stage,))) for stage in ("publish", *dgrad, *wgrad)]
        windows = []
        for generation in range(num_generations):
            groups = [*(self.replay_groups if generation else ()), *self.backward_groups] if has_dgrad else []
            groups += [(stage,) for stage in ending if has_wgrad and (is_mxfp8 or stage != "quantize")]
            windows += [Launch("+".join(group), group, generation, _stream(group)) for group in groups]
        return [*first, *windows, reduce]


def group_mask(stages: Sequence[str]) -> int:
    """The bit mask of the windowed stages among `stages`."""
    windowed = roster().windowed
    return sum(1 << windowed.index(stage) for stage in stages if stage in windowed)


def all_plans() -> list[Plan]:
    """The 16 contiguous plans, from `fused` to `split`."""
    plans = []
    for cuts in product((False, True), repeat=len(STAGES) - 1):
        groups: list[tuple[str, ...]] = [(STAGES[0],)]
        for is_cut, stage in zip(cuts, STAGES[1:], strict=True):
            if is_cut:
                groups.append((stage,))
            else:
                groups[-1] = (*groups[-1], stage)
        plans.append(Plan(tuple(groups)))
    return plans


def _stream(stages: Sequence[str]) -> Stream:
    """Kernels that only copy between ranks go beside the arithmetic."""
    return "comm" if roster().communicating.issuperset(stages) else "compute"


def _check_groups(groups: Sequence[Sequence[str]], given: str) -> None:
    """Raises ValueError unless the groups, read from left to right, are STAGES."""
    stages = [stage for group in groups for stage in group]
    for i, stage in enumerate(stages):
        if stage not in STAGES:
            problem = f"{stage!r} is not a stage" if stage else "an empty stage name"
        elif stage in stages[:i]:
            problem = f"{stage!r} stands there twice"
        elif i > 0 and STAGES.index(stage) < STAGES.index(stages[i - 1]):
            problem = f"{stage!r} stands after {stages[i - 1]!r}"
        else:
            continue
        raise ValueError(f"plan {given!r}: {problem}; a plan is {_RULE}")
    missing = [stage for stage in STAGES if stage not in stages]
    if missing:
        raise ValueError(f"plan {given!r}: {', '.join(missing)} missing; a plan is {_RULE}")
    if any(len(group) == 0 for group in groups):
        raise ValueError(f"plan {given!r}: an empty group; a plan is {_RULE}")
