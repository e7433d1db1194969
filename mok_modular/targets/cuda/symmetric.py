"""The memory of a rank that is a process: symmetric regions by NVSHMEM, local ones by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mok_modular.protocol.extension import extension
from mok_modular.ranks.process_group import ProcessRanks
from mok_modular.targets.cuda import nvshmem
from mok_modular.targets.cuda.memory import ZEROED, CudaMemory, copy_to_device


class ProcessMemory(CudaMemory):
    """The regions of one rank: symmetric ones by NVSHMEM, local ones by torch."""

    def __init__(self, ranks: ProcessRanks, runtime: nvshmem.Runtime, device: torch.device, timeout_s: float) -> None:
        super().__init__(ranks.size(), device, [ranks.rank()])
        self._ranks = ranks
        self._runtime = runtime
        self._rank = ranks.rank()
        self._timeout_s = timeout_s
        self._peers: dict[str, list[int]] = {}  # addresses of a region by rank
        self.generation = 0  # resets so far

    def reserve(self, shape: Any) -> None:
        """Makes every region large enough. Collective where a symmetric region grows: at creation, in `grow`, and in
        the first call with more experts of push dispatch or pull combine."""
        own = self.regions[self._rank]
        wanted = {
            name: shape.region_bytes()[name]
            for name in extension().symmetric_regions(shape)
            if shape.region_bytes()[name] > (own[name].numel() if name in own else 0)
        }
        if not wanted:
            super().reserve(shape)
            return
        self._grow(wanted)
        error: Exception | None = None
        try:
            super().reserve(shape)
        except Exception as caught:
            error = caught
        self._ranks.exchange("local memory", error, self._timeout_s)

    def address(self, rank: int, name: str) -> int:
        if rank == self._rank:
            return super().address(rank, name)
        return self._peers[name][rank] if name in self._peers else 0

    def _grow(self, wanted: Mapping[str, int]) -> None:
        own = self.regions[self._rank]
        self._begin_growth(min(wanted))
        for name in wanted:
            own.pop(name, None)
        asked = self._ranks.exchange("memory", (sorted(wanted.items()), self._runtime.dropped()), self._timeout_s)
        sizes = [each for each, _ in asked]
        if any(each != sizes[0] for each in sizes):
            given = "; ".join(f"rank {rank}: {dict(each)}" for rank, each in enumerate(sizes))
            raise ValueError(f"ranks need different symmetric memory, so their arguments differ ({given})")
        error: Exception | None = None
        try:
            with torch.cuda.device(self.device):
                self._runtime.release(set.intersection(*(dropped for _, dropped in asked)))
                for name, num_bytes in sorted(wanted.items()):
                    own[name] = self._runtime.allocate(num_bytes, self.device)
                    own[name].fill_(0 if name in ZEROED else 0xFF)
                    start = own[name].data_ptr()
                    self._peers[name] = [self._runtime.peer_address(start, rank) for rank in range(self.num_ranks)]
                torch.cuda.synchronize()
        except Exception as caught:
            error = caught
        unreachable = [rank for rank in range(self.num_ranks) if any(not peers[rank] for peers in self._peers.values())]
        try:
            everybody = self._ranks.exchange("memory", error if error is not None else unreachable, self._timeout_s)
        except Exception:
            for name in wanted:  # the same on every rank, so that all make them again together
                own.pop(name, None)
            raise
        pairs = [f"{rank} -> {peer}" for rank, peers in enumerate(everybody) for peer in peers]
        if pairs:
            raise RuntimeError(
                f"these ranks cannot reach the memory of these others with loads and stores: {', '.join(pairs)}. Their "
                "GPUs must be joined by NVLink (or PCIe peer access), and NVSHMEM_DISABLE_P2P must not be set"
            )

    def set_abort_words(self, shape: Any, ranks: Sequence[int]) -> None:
        """Ends the calls of `ranks`, from the host: by a copy engine, since kernels that wait may fill the GPU."""
        offset = 8 * extension().abort_word(shape, self._rank)
        value = torch.tensor([self.generation + 1], dtype=torch.int64).pin_memory()
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device):
            for rank in ranks:
                copy_to_device(self.address(rank, "words") + offset, value, stream)
        stream.synchronize()

    def reset_to(self, epochs: Sequence[int]) -> None:
        """New epochs, and words and counters from zero. The devices of all ranks must be idle."""
        own = self.regions[self._rank]
        own["epochs"].view(torch.int64).copy_(torch.tensor(epochs))
        for name in ("words", "counters", "arrivals"):
            if name in own:
                own[name].zero_()
        self.failures.zero_()
        self.generation = epochs[-1]
        torch.cuda.synchronize(self.device)

    def epochs(self) -> list[int]:
        """Finished calls, finished schedules, both together, resets."""
        return [int(epoch) for epoch in self.regions[self._rank]["epochs"].view(torch.int64).tolist()]
