"""The timeline of kernels: where a GPU keeps its records, and how the host reads them.

A workspace has one buffer for the ranks of this process, allocated by its first call with `MoKConfig(trace=True)`.
Kernels take room in it by an atomic and count what does not fit; a call only adds to it. Reading waits for the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from mok_modular.protocol.extension import extension
from mok_modular.protocol.roster import roster
from mok_modular.protocol.trace import Trace

NUM_RECORDS = 1 << 20
"""Records that a buffer has room for: 64 MiB. A tile of a product takes about 12, a task of a copy 4: by that count a
fused forward of 2,048 tokens of Kimi K2.7 with 16 experts takes 80,000."""
RECORD_BYTES = 64
SINK_BYTES = 32
"""Of TraceSink in csrc/targets/cuda/timeline.h, the last argument of a traced kernel."""
_LAUNCH = 8  # launch_idx among the 32-bit words of a record
_END = slice(2, 4)  # `end`: zero in what was taken and not written


@dataclass(frozen=True)
class TracedCall:
    """A call that was enqueued: the number of its first launch among all of the trace, and (kernel, stream) of each."""

    kind: str
    first_launch: int
    launches: Sequence[tuple[str, str]]


class TraceBuffer:
    """Records of calls that were enqueued and not yet read."""

    def __init__(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("trace=True allocates memory: it is not for a CUDA graph")
        self.capacity = NUM_RECORDS
        self.records = torch.zeros(self.capacity * RECORD_BYTES, dtype=torch.uint8, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # taken, dropped
        self._calls: list[TracedCall] = []
        self._num_launches = 0  # in all: a number is never used twice
        self._lock = Lock()
        torch.cuda.synchronize(device)  # whatever stream the first call is on

    def begin_call(self, kind: str, launches: Sequence[tuple[str, str]]) -> bytes:
        """Notes a call that is about to be enqueued. Returns the last argument of its kernels."""
        with self._lock:
            call = TracedCall(kind, self._num_launches, launches)
            self._calls.append(call)
            self._num_launches += len(launches)
        return struct.pack("<QQqq", self.records.data_ptr(), self.counts.data_ptr(), self.capacity, call.first_launch)

    def read(self, trace: Trace) -> None:
        """Moves everything into `trace`. Waits for the device."""
        with self._lock:
            if not self._calls:
                return
            torch.cuda.synchronize(self.records.device)
            num_taken, num_dropped = self.counts.tolist()
            taken = self.records[: min(num_taken, self.capacity) * RECORD_BYTES].cpu()
            calls = self._calls
            self._empty()
        split_calls(trace, taken, calls, num_dropped)

    def clear(self) -> None:
        """Forgets everything. Waits for the device."""
        with self._lock:
            torch.cuda.synchronize(self.records.device)
            self._empty()

    def _empty(self) -> None:
        self.records.zero_()
        self.counts.zero_()
        self._calls = []
        torch.cuda.synchronize(self.records.device)


def split_calls(trace: Trace, taken: Tensor, calls: Sequence[TracedCall], num_dropped: int) -> None:
    """Adds the records of several calls to a trace. `taken`: bytes on the CPU, with gaps of zeros."""
    module = extension()
    edges = [*roster().edge_names, *module.inner_wait_names()]
    words = taken.view(torch.int32).view(-1, RECORD_BYTES // 4)
    words = words[words[:, _END].any(dim=1)]
    for call in calls:
        last_launch = call.first_launch + len(call.launches) - 1
        own = words[(words[:, _LAUNCH] >= call.first_launch) & (words[:, _LAUNCH] <= last_launch)].clone()
        own[:, _LAUNCH] -= call.first_launch
        longs = own.view(torch.int64)
        result = {
            "trace": own.numpy().tobytes(),
            "num_dropped": num_dropped if call is calls[-1] else 0,
            "trace_end": int(longs[:, 1].max()) if len(own) else 0,
        }
        trace.add(call.kind, call.launches, result, roster().stage_names, edges)
