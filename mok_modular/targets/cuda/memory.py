"""The memory of a rank on a GPU, and what its kernels leave for the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.extension import extension
from mok_modular.targets.cuda.device import check, driver

ZEROED = frozenset({"words", "arrivals", "counters", "epochs", "num_tokens"})
"""Regions that start from zero; the others start full of NaN."""
NOTHING = torch.empty(0, dtype=torch.uint8)


class CudaMemory:
    """The regions of the ranks of this process, with the interface of the host target's Workspace."""

    def __init__(self, num_ranks: int, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        self.num_ranks = num_ranks
        self.device = device
        ranks = range(num_ranks) if ranks is None else ranks
        self.regions: dict[int, dict[str, Tensor]] = {rank: {} for rank in ranks}
        self.tables: list[Tensor] = []  # by rank of this process: the addresses of everybody's regions
        self.failures = torch.zeros(
            len(self.regions), extension().struct_sizes()["Failure"], dtype=torch.uint8, pin_memory=True
        )
        self._counters_of: Any = None
        self.layout = 0  # counts the times that regions or counters moved

    def reserve(self, shape: Any) -> None:
        """Makes every region large enough; see Workspace::reserve in csrc/targets/host.

        Raises torch.OutOfMemoryError; the next reserve of a shape for which there is room works.
        """
        growing = [
            (regions, name, num_bytes)
            for regions in self.regions.values()
            for name, num_bytes in shape.region_bytes().items()
            if num_bytes > regions.get(name, NOTHING).numel()
        ]
        if growing:
            self._begin_growth(growing[0][1])
        for regions, name, num_bytes in growing:
            fill = 0 if name in ZEROED else 0xFF
            regions[name] = torch.full((num_bytes,), fill, dtype=torch.uint8, device=self.device)
        counters_of = (shape.region_bytes()["counters"], shape.capacity_rows, shape.ring_rows, shape.minibatch)
        if counters_of != self._counters_of:  # they stand at other offsets now
            for regions in self.regions.values():
                regions["counters"].zero_()
            self._counters_of = counters_of
            self.layout += 1
        if not self.tables:
            self._make_tables(shape)
            torch.cuda.synchronize(self.device)  # the next call may be on another stream

    def _begin_growth(self, name: str) -> None:
        """Before regions are replaced, the first of which is `name`: kernels on any stream may still use them, and
        launches packed so far are void."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the workspace must grow for this call (region {name}): make one such call before a CUDA graph is "
                "captured"
            )
        torch.cuda.synchronize(self.device)
        self.tables = []
        self.layout += 1

    def _make_tables(self, shape: Any) -> None:
        names = extension().region_names()
        symmetric = set(extension().symmetric_regions(shape))
        self.tables = []
        for rank in self.regions:
            rows = [
                [self.address(peer, name) if peer == rank or name in symmetric else 0 for name in names]
                for peer in range(self.num_ranks)
            ]
            self.tables.append(torch.tensor(rows, dtype=torch.int64).to(self.device))

    def address(self, rank: int, name: str) -> int:
        """The device address of a rank's region as this process sees it, 0 where it is empty."""
        return self.regions[rank].get(name, NOTHING).data_ptr()

    def num_bytes(self) -> int:
        """Bytes of all regions of the ranks of this process."""
        return sum(region.numel() for regions in self.regions.values() for region in regions.values())

    def failure(self, index: int) -> dict[str, Any]:
        """What the kernels of a rank of this process left for the host."""
        result: dict[str, Any] = extension().unpack_failure(bytes(self.failures[index].numpy().tobytes()))
        return result

    def reset(self, shape: Any) -> None:
        """New epochs, above all old ones; counters from zero. The device must be idle."""
        epochs = [regions["epochs"].view(torch.int64).tolist() for regions in self.regions.values()]
        call, schedule, order, generation = (max(values) + 1 for values in zip(*epochs, strict=True))
        words = torch.tensor(extension().reset_words(shape, call, schedule), dtype=torch.int64)
        for regions in self.regions.values():
            regions["epochs"].view(torch.int64).copy_(torch.tensor([call, schedule, order, generation]))
            regions["words"].view(torch.int64).copy_(words)
            for name in ("counters", "arrivals"):
                if name in regions:
                    regions[name].zero_()
        self.failures.zero_()


def copy_to_device(address: int, value: Tensor, stream: torch.cuda.Stream) -> None:
    """Copies a tensor in pinned memory to a device address, which may be a peer's."""
    check(driver().cuMemcpyHtoDAsync(address, value.data_ptr(), value.nbytes, stream.cuda_stream))


def open_waits(failures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The waits that had expired or were open when the call ended, as rows of an error's table."""
    return [
        dict(failure, task=f"{failure['block']}.{failure['part']}")
        for failure in failures
        if failure["is_set"] and failure["reason"] in ("timeout", "aborted") and failure["edge"]
    ]
