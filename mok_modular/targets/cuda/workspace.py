"""The CUDA target: all ranks of a LocalGroup on one GPU, one grid a kernel for all of them. (Ranks that are processes:
process.py.)

Kernels are compiled at run time for sm_90a. A call enqueues its kernels on the current stream and returns; it never
waits for the device. What went wrong there is raised by the next call on the workspace or by `workspace.check()`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.call import Call, launches
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.diagnosis import culprit, describe_mismatch
from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError
from mok_modular.protocol.extension import extension
from mok_modular.protocol.trace import Trace
from mok_modular.targets.cuda.device import Function, arch_of_gpu, check_plan, get_device, kernel_of
from mok_modular.targets.cuda.grid import num_ctas
from mok_modular.targets.cuda.launch import MAX_LOCAL_RANKS, Launcher, PackedLaunch
from mok_modular.targets.cuda.memory import NOTHING, CudaMemory, open_waits
from mok_modular.targets.cuda.order import has_side_stream, in_streams
from mok_modular.targets.cuda.trace import SINK_BYTES, TraceBuffer
from mok_modular.targets.shared_workspace import SharedWorkspace, planted_faults

MAX_PACKED = 256
"""Packed calls that a workspace keeps (about 20 KB each), before all are forgotten."""


@dataclass(frozen=True)
class _Step:
    """A packed launch of a call, and which stream it goes to."""

    kernel: str
    stream: str  # the plan's: comm or compute
    launch: PackedLaunch
    is_on_side: bool  # where the call has a side stream
    is_last: bool


class CudaWorkspace(Launcher, SharedWorkspace):
    """The memory of a LocalGroup on one GPU."""

    functions: Mapping[str, Function]

    def __init__(self, group: Any, config: MoKConfig, num_local_tokens: int, hidden_size: int, topk: int) -> None:
        self.torch_device = torch.device(group.device)
        check_plan(config, arch_of_gpu(self.torch_device.index or 0))
        Launcher.__init__(self)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a workspace allocates memory, so create it before a CUDA graph is captured")
        self._last_end: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None  # of the call before
        self._side: torch.cuda.Stream | None = None
        self._packed: dict[Any, tuple[int, list[_Step]]] = {}  # by the keys of calls: layout, launches
        self.is_timing = False  # record an event pair around every kernel
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._traced: Mapping[str, Function] = {}  # the functions of traced calls, from the first one on
        self._trace_buffer: TraceBuffer | None = None
        self._open(group, config)
        SharedWorkspace.__init__(self, group, config, num_local_tokens, hidden_size, topk)

    def _open(self, group: Any, config: MoKConfig) -> None:
        """Compiles and loads the kernels, before there is any memory."""
        if group.size() > MAX_LOCAL_RANKS:
            raise ValueError(f"a LocalGroup on one GPU has at most {MAX_LOCAL_RANKS} ranks, got {group.size()}")
        self.device = get_device(self.torch_device.index or 0)
        self.functions = self.device.functions
        self.ranks = range(group.size())
        self._load_persistent(config)
        if config.trace:
            self._traced = self._load_traced()

    def _load_persistent(self, config: MoKConfig) -> list[Function]:
        """Those that calls with this config need, compiled and loaded before a kernel can wait for another."""
        kernels = [kernel_of(group, config.combine == "pull") for group in config.plan.groups]
        return [self.device.persistent(kernel, config.trace) for kernel in kernels if isinstance(kernel, int)]

    def _load_traced(self) -> Mapping[str, Function]:
        """`functions` with their timeline."""
        return self.device.traced_functions()

    def _make_memory(self) -> Any:
        return CudaMemory(self.num_ranks, self.torch_device)

    def region(self, rank: int, name: str, dtype: torch.dtype) -> Tensor:
        return self.native.regions[rank].get(name, NOTHING.to(self.torch_device)).view(dtype)

    def interrupt(self) -> None:
        """Nothing to do: a call returns before its kernels run."""

    def check(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        self._poll()
        super().check()

    def reset(self) -> list[None]:
        torch.cuda.synchronize(self.torch_device)
        self.native.reset(self._smallest_shape())
        self.failure = None
        return [None] * self.num_ranks

    def clear_trace(self) -> None:
        self.trace = Trace("ns", roles=tuple(extension().trace_role_names()))
        if self._trace_buffer is not None:
            self._trace_buffer.clear()

    def read_trace(self) -> Trace:
        if self._trace_buffer is not None:
            self._trace_buffer.read(self.trace)
        return self.trace

    def _poll(self) -> None:
        """Looks, without waiting, at what kernels of earlier calls left."""
        if self.failure is not None or not bool(self.native.failures.any()):
            return
        self.failure = self._explain([self.native.failure(i) for i in range(len(self.ranks))])

    def _explain(self, failures: Sequence[Mapping[str, Any]]) -> Exception | None:
        """The error for what the kernels of `ranks` left, None if that is nothing yet."""
        error: Exception | None = None
        for rank, failure in zip(self.ranks, failures, strict=True):
            if failure["num_invalid_ids"]:
                error = ValueError(
                    f"top_experts (expert_ids of a layer) of rank {rank} held {failure['num_invalid_ids']} ids out of "
                    "range in an earlier call; they were taken as -1 (no route)"
                )
        waits = open_waits(failures)
        for failure in failures:
            if failure["is_set"] and failure["reason"] == "mismatch":
                error = MoKPeerError(f"rank {failure['peer']} makes another call than rank {failure['rank']}")
            elif failure["is_set"] and failure["reason"] == "capacity":
                error = ValueError(
                    f"{failure['want']} rows come to rank {failure['rank']}, but schedule_capacity_multiplier="
                    f"{self.config.schedule_capacity_multiplier} leaves room for {failure['have']}"
                )
        if any(failure["is_set"] and failure["reason"] == "timeout" for failure in failures):
            error = MoKTimeoutError(f"a wait expired in an earlier call; {culprit(waits)}", waits)
        return error

    def run(self, calls: Sequence[Call]) -> list[Exception | None]:
        """Enqueues the kernels of one call of every rank."""
        self._poll()
        if self.failure is not None:
            return [copy.copy(self.failure) for _ in calls]  # every rank's own: notes and tracebacks do not mix
        if any(call.agree != calls[0].agree or call.kind != calls[0].kind for call in calls):
            return [MoKPeerError(describe_mismatch(calls)) for _ in calls]
        config = calls[0].config
        if planted_faults:
            text = "planted faults are for CPU ranks in this version: the kernels of a GPU cannot lose a signal"
            return [ValueError(text) for _ in calls]
        if config.trace and torch.cuda.is_current_stream_capturing():
            text = "trace=True cannot be captured in a CUDA graph: every call has a number of its own in the trace"
            return [ValueError(text) for _ in calls]
        key = tuple(call.key for call in calls)
        layout, steps = self._packed.get(key, (-1, []))
        with torch.cuda.device(self.torch_device):
            self.device.make_current()
            # One rank launches for all: behind what each has enqueued on its own stream, before what comes there next.
            main = torch.cuda.current_stream()
            others = [call.stream for call in calls if call.stream is not None and call.stream != main]
            for stream in others:
                main.wait_stream(stream)
            self._wait_for_last_call(main)  # before counters may be cleared on this stream
            if layout != self.native.layout:
                try:
                    check_plan(config, self.device.arch)
                    if calls[0].kind not in ("schedule", "forward") or calls[0].is_mxfp8:
                        what = "mxfp8" if calls[0].is_mxfp8 else calls[0].kind
                        raise ValueError(
                            f"{what} has no kernels on {self.device.arch.name} in this version, forward in bf16 has"
                        )
                except ValueError as error:
                    return [copy.copy(error) for _ in calls]
                steps = self._pack(calls)
                if None not in key:
                    if len(self._packed) >= MAX_PACKED:
                        self._packed.clear()
                    self._packed[key] = self.native.layout, steps
            if config.trace:
                self._begin_trace(calls[0].kind, steps)
            self._enqueue(steps, main, self._side_stream(config, calls[0].kind))
            for stream in others:
                stream.wait_stream(main)
            self._note_end(main)
        return [None] * len(calls)

    def _begin_trace(self, kind: str, steps: Sequence[_Step]) -> None:
        if self._trace_buffer is None:
            self._trace_buffer = TraceBuffer(self.torch_device)
        sink = self._trace_buffer.begin_call(kind, [(step.kernel, step.stream) for step in steps])
        for step in steps:
            step.launch.replace_last_argument(sink)

    @property
    def layout(self) -> int:
        """Another number whenever regions or counters have moved: what was packed before is void."""
        return int(self.native.layout)

    def _wait_for_last_call(self, stream: torch.cuda.Stream) -> None:
        """Two streams on one workspace cannot interleave. (Inside a graph, streams are joined by who captures it.)"""
        if self._last_end is not None and self._last_end[0] != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._last_end[1])

    def _note_end(self, stream: torch.cuda.Stream) -> None:
        if not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event() if self._last_end is None else self._last_end[1]
            event.record(stream)
            self._last_end = (stream, event)

    def _pack(self, calls: Sequence[Call]) -> list[_Step]:
        """The launches of a call of every rank, with all their arguments."""
        first = calls[0]
        config = first.config
        shape = self.shape(first.num_local_experts, first.capacity_rows, first.intermediate_size, first.shared_size)
        self._reserve(shape, first)
        programs = [self._program(rank, call, shape) for rank, call in zip(self.ranks, calls, strict=True)]
        call_set = self._pack_calls(programs, config.timeout_s, config.start_timeout_s)
        maps = b""
        if first.kind == "forward":
            maps = self._all_maps([call.tensors for call in calls], [call.num_tokens for call in calls], shape)
        steps = []
        for i, each in enumerate(in_streams(config, first.kind, launches(first, shape), self._num_sms(config))):
            launch = each.launch
            function = self._function(launch.stages, config.trace)
            arguments = [
                call_set,
                extension().pack_launch(programs[0], i, each.num_comm_ctas, each.has_experts_in_turn),
            ]
            if function.has_maps:
                arguments.append(maps)
            if function.is_traced:
                arguments.append(bytes(SINK_BYTES))
            num_comm_sms = config.fwd_num_comm_sms or 0
            grid = num_ctas(self._num_sms(config), num_comm_sms, function.ctas_per_sm, each.share)
            packed = PackedLaunch(function, arguments, grid)
            steps.append(_Step(launch.kernel, launch.stream, packed, each.is_on_side, each.is_last))
        return steps

    def _enqueue(self, steps: Sequence[_Step], main: torch.cuda.Stream, side: torch.cuda.Stream | None) -> None:
        """On the streams that `in_streams` says."""
        if side is not None:
            side.wait_stream(main)
        for step in steps:
            if side is not None and step.is_last:
                main.wait_stream(side)
            stream = side if side is not None and step.is_on_side else main
            if self.is_timing:
                with self._timer(step.kernel, stream):
                    step.launch.enqueue(stream.cuda_stream)
            else:
                step.launch.enqueue(stream.cuda_stream)

    def _function(self, stages: tuple[str, ...], is_traced: bool) -> Function:
        kernel = kernel_of(stages, self.config.combine == "pull")
        if isinstance(kernel, int):
            return self.device.persistent(kernel, is_traced)
        if is_traced and not self._traced:
            self._traced = self._load_traced()
        return self._traced[kernel] if is_traced else self.functions[kernel]

    def _side_stream(self, config: MoKConfig, kind: str) -> torch.cuda.Stream | None:
        if not has_side_stream(config, kind, self._num_sms(config)):
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(self.torch_device)
        return self._side

    def _num_sms(self, config: MoKConfig) -> int:
        """SMs that are not reserved."""
        return max(1, self.device.num_sms - config.num_reserved_sms)

    @contextmanager
    def _timer(self, kernel: str, stream: torch.cuda.Stream) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self._events.append((kernel, begin, end))

    def kernel_times_s(self) -> list[tuple[str, float]]:
        """Kernels launched since the last look while `is_timing` was set, and their seconds. Waits for the device."""
        torch.cuda.synchronize(self.torch_device)
        times = [(kernel, begin.elapsed_time(end) * 1e-3) for kernel, begin, end in self._events]
        self._events.clear()
        return times
