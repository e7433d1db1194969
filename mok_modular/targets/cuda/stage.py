"""One stage's kernel alone on a GPU: StageRun with the memory and the kernels of the CUDA target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.diagnosis import culprit
from mok_modular.protocol.errors import MoKTimeoutError
from mok_modular.protocol.extension import extension
from mok_modular.targets.cuda.arch import ARCHES
from mok_modular.targets.cuda.device import entries, get_device
from mok_modular.targets.cuda.launch import Launcher
from mok_modular.targets.cuda.memory import CudaMemory, open_waits
from mok_modular.targets.stage_base import StageRun

TIMEOUT_S = 10.0


class CudaStageRun(Launcher, StageRun):
    """As StageRun, for the ranks of a LocalGroup on one GPU. `launch` waits for the kernel's end.

    A tensor that `launch` gets must be on that GPU. There are no statistics: `launch` returns an empty list a rank.
    """

    row_blocks: tuple[int, ...] = tuple(sorted({arch.row_block for arch in ARCHES}))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Launcher.__init__(self)
        StageRun.__init__(self, *args, **kwargs)

    def _make_memory(self) -> Any:
        self.torch_device = torch.device(self.group.device)
        self.device = get_device(self.torch_device.index or 0)
        self.ranks = range(self.group.size())
        self.tables = [{name: each.to(self.torch_device) for name, each in table.items()} for table in self.tables]
        # The words and counters of a state in which every wait is over: as the host target makes them.
        satisfied = extension().Workspace(self.group.size())
        satisfied.reserve(self.shape)
        satisfied.satisfy(0)
        memory = CudaMemory(self.group.size(), self.torch_device)
        memory.reserve(self.shape)
        for rank in self.ranks:
            for name in ("words", "counters", "arrivals"):
                if satisfied.region_bytes(rank, name):
                    memory.regions[rank][name].copy_(torch.from_dlpack(satisfied.region(rank, name)).view(torch.uint8))
        return memory

    def region(self, rank: int, name: str, width: int) -> Tensor:
        region = self.native.regions[rank].get(name)
        if region is None:
            return torch.empty(0, width, dtype=torch.bfloat16, device=self.torch_device)
        return region.view(torch.bfloat16).view(-1, width)

    def launch(
        self, tensors: Sequence[Mapping[str, Tensor]] | None = None, swiglu_limit: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Runs the kernel on all ranks. Raises MoKTimeoutError if the stage waits for something after all."""
        programs = self._programs(tensors, swiglu_limit)
        by_rank = list(tensors) if tensors else [{}] * len(self.ranks)
        function = self.device.functions[entries()[(self.stage,)]]
        with torch.cuda.device(self.torch_device):
            arguments = [self._pack_calls(programs, TIMEOUT_S, TIMEOUT_S), extension().pack_launch(programs[0], 0)]
            if function.has_maps:
                arguments.append(self._all_maps(by_rank, self.num_tokens, self.shape))
            self._launch(function, arguments, torch.cuda.current_stream().cuda_stream, self.device.num_sms)
            torch.cuda.synchronize()
        failures = [self.native.failure(rank) for rank in self.ranks]
        if any(failure["is_set"] for failure in failures):
            waits = open_waits(failures)
            raise MoKTimeoutError(f"{self.stage} alone: {culprit(waits)}", waits)
        return [[] for _ in self.ranks]
