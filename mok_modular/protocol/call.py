"""A collective call as a target gets it from each rank, and the kernel launches that it consists of."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.plan import Launch, Plan, group_mask
from mok_modular.protocol.roster import roster

STREAMS = {"comm": 0, "compute": 1}


@dataclass
class Call:
    """One rank's part of a collective call, with pointers taken from `schedule` and `tensors`."""

    kind: str  # "schedule", or the name of a function of mok_modular.functional
    plan: Plan
    num_tokens: int
    num_local_experts: int
    capacity_rows: int
    schedule: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    agree: Mapping[str, Any]  # what every rank must have the same of, by name
    intermediate_size: int = 64
    shared_size: int = 0
    swiglu_limit: float | None = None
    is_mxfp8: bool = False  # operands of the routed experts
    config: MoKConfig = field(default_factory=MoKConfig)
    stream: torch.cuda.Stream | None = None  # the rank's current one, on a GPU
    key: Any = None  # of everything that kernels are told: equal keys, equal arguments. None: unknown

    @property
    def is_backward(self) -> bool:
        """A backward, or one half of it: macrobatches ascend."""
        return self.kind.startswith("backward")

    def fingerprint(self) -> int:
        """16 bits over `agree`, for the words that ranks exchange."""
        return zlib.crc32(repr(sorted(self.agree.items())).encode()) & 0xFFFF

    def spoil(self) -> None:
        """NaN in what the call has written for its caller: somebody may use it before the error is seen."""
        is_added_to = any(name.startswith("gradients_") for name in self.tensors)
        for name, tensor in self.tensors.items():
            if name in ("output", "d_router") or (name.startswith(("d_routed_", "d_shared_")) and not is_added_to):
                tensor.fill_(math.nan)


def launches(call: Call, shape: Any) -> list[Launch]:
    """The kernel launches of a call on every rank, in order."""
    if call.kind == "schedule":
        return [Launch("schedule", ("schedule",), None, "comm")]
    has_shared = call.shared_size > 0
    if call.kind == "recompute_forward_context":
        return call.plan.recompute_launches(has_shared)
    if call.is_backward:
        return call.plan.backward_launches(
            shape.max_generations,
            has_shared,
            has_dgrad=call.kind != "backward_wgrad",
            has_wgrad=call.kind != "backward_dgrad",
            is_mxfp8=call.is_mxfp8,
        )
    return call.plan.launches(shape.max_generations, has_shared)


def last_remote_launch(in_order: Sequence[Launch]) -> int:
    """The launch behind which a rank has no remote access left; -1 if none works through the ring."""
    remote = roster().communicating
    windowed = [i for i, launch in enumerate(in_order) if group_mask(launch.stages)]
    reaching = [i for i in windowed if any(stage in in_order[i].stages for stage in remote)]
    return max(reaching or windowed, default=-1)


@dataclass(frozen=True)
class KernelArguments:
    """What a kernel is told of its launch (`Launch` in csrc/layout.h), and its place among the others."""

    name: str
    group: int
    stage: str
    generation: int
    has_prologue: bool
    is_last_group: bool
    is_join: bool
    stream: int


def kernel_arguments(in_order: Sequence[Launch]) -> list[KernelArguments]:
    """Those of each launch of a call."""
    last_group = last_remote_launch(in_order)
    return [
        KernelArguments(
            launch.kernel,
            group_mask(launch.stages),
            launch.stages[0],
            -1 if launch.generation is None else launch.generation,
            "publish" in launch.stages and len(launch.stages) > 1,
            i == last_group,
            launch.kernel == "reduce",
            STREAMS[launch.stream],
        )
        for i, launch in enumerate(in_order)
    ]


def has_both_roles(launch: Launch, *, is_pull_combine: bool) -> bool:
    """Whether a kernel holds communication and compute tasks: then workers of two roles may draw them."""
    own = [
        stage
        for stage in launch.stages
        if roster().has_own_tasks(stage, launch.stages, is_pull_combine=is_pull_combine)
    ]
    communicating = roster().communicating
    return not communicating.isdisjoint(own) and not communicating.issuperset(own)
