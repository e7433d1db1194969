"""One stage's kernel alone on the host target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.errors import MoKDeadlockError, MoKTimeoutError
from mok_modular.protocol.extension import extension
from mok_modular.targets.stage_base import StageRun


class HostStageRun(StageRun):
    """The ranks of one launch in this process."""

    def _make_memory(self) -> Any:
        memory = extension().Workspace(len(self.tables))
        memory.reserve(self.shape)
        return memory

    def region(self, rank: int, name: str, width: int) -> Tensor:
        if self.native.region_bytes(rank, name) == 0:
            return torch.empty(0, width, dtype=torch.bfloat16)
        return torch.from_dlpack(self.native.region(rank, name)).view(torch.bfloat16).view(-1, width)

    def launch(
        self, tensors: Sequence[Mapping[str, Tensor]] | None = None, swiglu_limit: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Runs the kernel on all ranks, with every rank's `tensors` by the names of csrc/call.h (contiguous).

        Returns the statistics of the stage by rank: one dict with `num_rows`, `num_bytes`, `flops`, `busy_s`,
        `wait_s`. Raises MoKDeadlockError (on threads MoKTimeoutError) if the stage waits for something after all.
        """
        programs = self._programs(tensors, swiglu_limit)
        self.native.satisfy(0, self.kind)
        group = self.group
        is_threads = group.executor == "threads"
        result = extension().run(self.native, programs, group.order, group.seed, is_threads, 10.0, 10.0)
        if result["reason"] != "ok":
            kind = MoKDeadlockError if result["reason"] == "deadlock" else MoKTimeoutError
            waits = [dict(wait, task=f"{wait['block']}.{wait['part']}") for wait in result["waits"]]
            raise kind(f"{self.stage} alone: {result['reason']}", waits)
        return result["stats"]
