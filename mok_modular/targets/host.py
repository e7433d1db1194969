"""The host target: runs the compiled stage code for all ranks of a LocalGroup in this process."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mok_modular.config import MoKConfig
from mok_modular.errors import MoKDeadlockError, MoKPeerError, MoKSignalError, MoKTimeoutError
from mok_modular.plan import WINDOWED_STAGES, Launch, Plan, group_mask
from mok_modular.swap import Swap
from mok_modular.targets.sizes import Sizes, extension
from mok_modular.trace import Trace

if TYPE_CHECKING:
    from mok_modular.group import LocalGroup

STREAMS = {"comm": 0, "compute": 1}

planted_faults: list[dict[str, Any]] = []
"""What mok_modular.testing.faults has planted in every run of this process."""

WRITERS = {
    "topk_ready": ("schedule",),
    "input_ready": ("publish",),
    "entered": ("publish", "schedule"),
    "done": ("combine", "down", "publish", "reduce", "reverse_dispatch", "gate_up_dgrad"),
    "x_ready": ("dispatch",),
    "x_arrived": ("dispatch",),
    "gate_up_ready": ("gate_up",),
    "hidden_ready": ("swiglu", "gate_up"),
    "y_ready": ("down",),
    "y_arrived": ("down",),
    "slot_free": ("combine", "down", "reverse_dispatch", "gate_up_dgrad", "wgrad"),
    "shared_hidden_ready": ("shared_gate_up",),
    "shared_ready": ("shared_down", "shared_gate_up_dgrad"),
    "d_y_ready": ("reverse_combine",),
    "d_hidden_ready": ("down_dgrad",),
    "d_gate_up_ready": ("swiglu_backward", "down_dgrad"),
    "d_x_ready": ("gate_up_dgrad",),
    "segment_ready": ("swiglu_backward", "down_dgrad", "quantize"),
    "carry_done": ("wgrad",),
    "shared_d_gate_up_ready": ("shared_down_dgrad",),
    "published": ("publish",),
}
"""Which stages publish an edge."""

TASK_ORDER = (
    "publish",
    "shared_gate_up",
    "shared_down",
    "shared_down_dgrad",
    "shared_gate_up_dgrad",
    "shared_wgrad",
    *WINDOWED_STAGES,
    "reduce",
)
"""The stages in the order of a rank's tasks; a call has those of its pass."""

_SCHEDULE_ORDER = ("topk_ready", "ids_counted", "laid_out")
_START_EDGES = ("entered", "topk_ready", "input_ready")  # what only a late rank can delay


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


class SharedWorkspace:
    """The memory of a group and the state that its ranks share: failure, statistics, injected faults."""

    def __init__(
        self, group: LocalGroup, config: MoKConfig, num_local_tokens: int, hidden_size: int, topk: int
    ) -> None:
        self.group = group
        self.config = config
        self.num_local_tokens = num_local_tokens
        self.hidden_size = hidden_size
        self.topk = topk
        self.num_ranks = group.size()
        self.native = self._make_memory()
        self.stats: list[dict[tuple[str, str, str], dict[str, Any]]] = [{} for _ in range(group.size())]
        self.failure: Exception | None = None
        self.lost_signals: list[tuple[str, int, int, int]] = []  # edge, rank, destination rank or -1, index or -1
        self.num_switches = 0
        self.clear_trace()
        self.signal_uses: set[tuple[str, str, str]] = set()  # stage, edge, wait or publish; of traced calls
        self.has_backward = False  # from the first backward on: room for it
        group.on_interrupt(self)
        self.native.reserve(self.shape(num_local_experts=1, capacity_rows=self.row_block, intermediate_size=64))

    def _make_memory(self) -> Any:
        return extension().Workspace(self.num_ranks)

    @property
    def key(self) -> Any:
        """Which of the group's workspaces this is, for a comparison between ranks."""
        return id(self)

    def tell_peers(self, name: str, error: Exception) -> None:
        """A rank cannot make its part of a call. Nothing to do where all ranks meet for it."""

    @property
    def row_block(self) -> int:
        """Rows of the unit of padding and signals."""
        return self.sizes.row_block

    @property
    def sizes(self) -> Sizes:
        """What the sizes of a call follow from."""
        return Sizes(self.config, self.num_ranks, self.num_local_tokens, self.hidden_size, self.topk)

    def capacity_rows(self, num_local_experts: int) -> int:
        """Rows that a rank's schedule has room for."""
        return self.sizes.capacity_rows(num_local_experts)

    def shape(self, num_local_experts: int, capacity_rows: int, intermediate_size: int, shared_size: int = 0) -> Any:
        """The Shape of csrc/layout.h for a call."""
        return self.sizes.shape(num_local_experts, capacity_rows, intermediate_size, shared_size, self.has_backward)

    def region(self, rank: int, name: str, dtype: torch.dtype) -> Tensor:
        """A region of a rank's memory as a flat tensor; valid until the workspace grows."""
        num_bytes = self.native.region_bytes(rank, name)
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_dlpack(self.native.region(rank, name)).view(dtype)

    def grow(self, num_tokens: int) -> None:
        """Room for more tokens a rank; regions move, and none holds anything between calls."""
        old = self.num_local_tokens
        if num_tokens <= old:
            return
        self.num_local_tokens = num_tokens
        try:
            self.native.reserve(self.shape(num_local_experts=1, capacity_rows=self.row_block, intermediate_size=64))
        except MemoryError:
            self.num_local_tokens = old
            raise

    def clear_trace(self) -> None:
        """Starts the trace anew."""
        executor = getattr(self.group, "executor", None)  # ranks that are processes have none
        self.trace = Trace("ns" if executor == "threads" else "steps")

    def read_trace(self) -> Trace:
        """What traced calls have recorded so far."""
        return self.trace

    def interrupt(self) -> None:
        """Ends a running call (Ctrl-C)."""
        self.native.interrupt()

    def check(self) -> None:
        """Raises the failure that no reset has followed."""
        if self.failure is not None:
            raise copy.copy(self.failure)  # every rank's own: notes and tracebacks do not mix

    def reset(self) -> list[None]:
        """New epochs for all ranks."""
        self.native.reset()
        self.failure = None
        return [None] * self.num_ranks

    # ---- running ----

    def run(self, calls: Sequence[Call]) -> Sequence[BaseException | None]:
        """Runs one call of every rank to its end; returns what each rank must raise, or None."""
        if self.failure is not None:
            text = f"an earlier call on this workspace failed; call workspace.reset() on every rank ({self.failure})"
            return [RuntimeError(text.splitlines()[0]) for _ in calls]
        for fault in planted_faults:
            if (rank := max(fault["rank"], fault.get("dst_rank", -1))) >= self.num_ranks:
                text = f"a planted fault ({fault['kind']}) is of rank {rank}, the group has {self.num_ranks} ranks"
                return [ValueError(text) for _ in calls]
        self.has_backward |= any(call.is_backward for call in calls)
        shapes = [
            self.shape(call.num_local_experts, call.capacity_rows, call.intermediate_size, call.shared_size)
            for call in calls
        ]
        for call, shape in zip(calls, shapes, strict=True):
            shape.is_mxfp8 = call.is_mxfp8
        if _is_mismatch_hidden(calls):
            return [MoKPeerError(describe_mismatch(calls)) for _ in calls]
        # Ranks whose calls differ run until they see it: each one's memory must hold what it works on until then.
        for shape in shapes if any(call.agree != calls[0].agree for call in calls) else shapes[:1]:
            self.native.reserve(shape)
        swap = Swap(self, calls, shapes[0].ring_rows)
        programs = [
            self._program(rank, call, shape, swap) for rank, (call, shape) in enumerate(zip(calls, shapes, strict=True))
        ]
        config = calls[0].config
        try:
            result = extension().run(
                self.native,
                programs,
                self.group.order,
                self.group.seed,
                self.group.executor == "threads",
                config.timeout_s,
                config.start_timeout_s,
                self.lost_signals,
                planted_faults,
                config.trace,
                self.trace.end,
            )
        except Exception as error:  # out of memory or threads: some ranks may be ahead of others
            self.failure = RuntimeError(f"{calls[0].kind}: {type(error).__name__}: {error}")
            raise
        self.num_switches += result["num_switches"]
        for rank, rows in enumerate(result["stats"]):
            self._add_stats(rank, rows, "backward" if calls[rank].is_backward else "forward")
        if config.trace:
            streams = [(launch.kernel, launch.stream) for launch in launches(calls[0], shapes[0])]
            names = extension().stage_names(), extension().edge_names()
            self.trace.add(calls[0].kind, streams, result, *names)
            self.signal_uses.update(result["uses"])
        if result["reason"] == "ok":
            return [None] * len(calls)
        errors = self._errors(result, calls)
        if swap.errors:
            rank = next(iter(swap.errors))
            peer_error = MoKPeerError(swap.describe(rank), rank)
            self.failure = peer_error
            return [swap.errors.get(each, peer_error) for each in range(len(calls))]
        self.failure = errors[0]
        return list(errors)

    def _program(self, rank: int, call: Call, shape: Any, swap: Swap | None = None) -> Any:
        in_order = launches(call, shape)
        program = extension().Program(
            call.kind,
            shape,
            rank,
            call.num_tokens,
            call.fingerprint(),
            [group_mask(launch.stages) for launch in in_order],
            {name: tensor.data_ptr() for name, tensor in call.schedule.items() if tensor.numel()},
            {name: tensor.data_ptr() for name, tensor in call.tensors.items() if tensor.numel()},
            call.swiglu_limit,
            call.schedule["token_row"].numel() // self.num_ranks,
        )
        last_group = last_remote_launch(in_order)
        for i, launch in enumerate(in_order):
            num_workers, num_comm_workers = self._num_workers(call, launch)
            swapped = swap.function(rank, launch.stages, launch.generation) if swap else None
            if swapped is not None:
                num_workers, num_comm_workers = 1, 0
            program.add_launch(
                launch.kernel,
                group_mask(launch.stages),
                launch.stages[0],
                -1 if launch.generation is None else launch.generation,
                "publish" in launch.stages and len(launch.stages) > 1,
                i == last_group,
                launch.kernel == "reduce",
                STREAMS[launch.stream],
                num_workers,
                num_comm_workers,
                swapped,
            )
        return program

    def _num_workers(self, call: Call, launch: Launch) -> tuple[int, int]:
        """Workers of a kernel: (compute, communication). Roles part only where a kernel holds both kinds of
        tasks; a single worker draws both from one sequence."""
        is_pulling = self.config.combine == "pull"
        has_comm = (
            "dispatch" in launch.stages
            or "reverse_combine" in launch.stages
            or ("combine" in launch.stages and is_pulling)
        )
        has_compute = any(stage in launch.stages for stage in ("gate_up", "swiglu", "down", "down_dgrad"))
        num_comm_workers = call.config.bwd_num_comm_sms if call.is_backward else call.config.fwd_num_comm_sms
        if num_comm_workers is None:
            num_comm_workers = self.group.num_workers // 2
        if not (has_comm and has_compute):
            num_comm_workers = 0
        return self.group.num_workers, num_comm_workers

    def _add_stats(self, rank: int, rows: Sequence[Mapping[str, Any]], direction: str) -> None:
        for row in rows:
            key = (row["name"], direction, row["kernel"])
            total = self.stats[rank].setdefault(key, {"name": row["name"], "pass": direction, "kernel": row["kernel"]})
            for name in ("num_rows", "num_bytes", "flops", "busy_s", "wait_s"):
                total[name] = total.get(name, 0) + row[name]

    def _errors(self, result: Mapping[str, Any], calls: Sequence[Call]) -> list[Exception]:
        reason = result["reason"]
        if reason in ("interrupted", "swapped"):
            return [MoKPeerError("interrupted") for _ in calls]
        if reason == "mismatch":
            text = describe_mismatch(calls)
            return [MoKPeerError(text) for _ in calls]
        waits = [dict(wait, task=f"{wait['block']}.{wait['part']}") for wait in result["waits"]]
        if reason == "surplus":
            for each in waits:
                each["have"] -= 2**64 if each["have"] >= 2**63 else 0
            for call in calls:
                call.spoil()
            worst = waits[0]
            text = (
                f"{calls[0].kind}: {worst['edge']}[{worst['index']}] of rank {worst['rank']} has the wrong number of "
                f"arrivals: {worst['stage']} task {worst['task']} waited for {worst['want']}, {worst['have']} came"
            )
            return [MoKSignalError(text, waits) for _ in calls]
        kind = MoKDeadlockError if reason == "deadlock" else MoKTimeoutError
        ring_blocks = max(1, min(self.config.macrobatch_size, calls[0].capacity_rows) // self.row_block)
        what = "no worker of any rank can go on"
        if reason == "timeout":
            wait = find_culprit(waits, ring_blocks, calls[0].is_backward)
            name = "start_timeout_s" if wait and wait["edge"] in _START_EDGES else "timeout_s"
            what = f"a wait lasted longer than {name}={getattr(calls[0].config, name):g} s"
        why = culprit(waits, ring_blocks, calls[0].is_backward)
        places = {
            f"rank {each['rank']} in {each['stage']} task {each['block']}.{each['part']}" for each in result["held"]
        }
        for each in result["held"]:
            calls[each["rank"]].spoil()
        if places:
            why += f"; {', '.join(sorted(places))}: neither works nor waits"
        return [kind(f"{call.kind}: {what}; {why}", waits) for call in calls]


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
    remote = ("dispatch", "combine", "reverse_combine", "reverse_dispatch")
    windowed = [i for i, launch in enumerate(in_order) if group_mask(launch.stages)]
    reaching = [i for i in windowed if any(stage in in_order[i].stages for stage in remote)]
    return max(reaching or windowed, default=-1)


def _is_mismatch_hidden(calls: Sequence[Call]) -> bool:
    """Two ranks make different calls, and their fingerprints are the same by chance: no wait would see it."""
    first: dict[tuple[str, int], Call] = {}
    return any(call.agree != first.setdefault((call.kind, call.fingerprint()), call).agree for call in calls)


def find_culprit(
    waits: Sequence[Mapping[str, Any]], ring_blocks: int = 1 << 30, is_backward: bool = False
) -> Mapping[str, Any] | None:
    """The wait that nobody is on the way to end; the others follow from it. None if there are no waits.

    A task waits only for tasks before it in its rank's order (by generations of `ring_blocks` row blocks, then by
    stages) or for other ranks. So the first wait of a rank in that order is the one to look at, unless it is for
    a rank that itself waits before it could publish the edge.
    """

    def place(wait: Mapping[str, Any]) -> tuple[float, int]:
        if wait["stage"] == "schedule":
            return 0, _SCHEDULE_ORDER.index(wait["edge"])
        generation: float = wait["block"] // ring_blocks  # macrobatches ascend in a backward, else descend
        if not is_backward:
            generation = -generation
        if wait["stage"] not in WINDOWED_STAGES:
            generation = math.inf if wait["stage"] == "reduce" else -math.inf
        return generation, TASK_ORDER.index(wait["stage"])

    is_id_missing = any(wait["stage"] == "schedule" and wait["peer"] >= 0 for wait in waits)

    def is_root(wait: Mapping[str, Any]) -> bool:
        if wait["stage"] == "schedule" and wait["peer"] < 0 and is_id_missing:
            return False  # everything else in a schedule comes behind the ids of all ranks
        if wait["peer"] < 0:
            return not any(other["rank"] == wait["rank"] and place(other) < place(wait) for other in waits)
        if wait["stage"] == "schedule":
            return True
        last_writer = {"done": "wgrad" if is_backward else "combine", "entered": "publish"}.get(
            wait["edge"], WRITERS[wait["edge"]][-1]
        )
        num_before = TASK_ORDER.index(last_writer) + 1
        return not any(
            other["rank"] == wait["peer"] and other is not wait and other["stage"] in TASK_ORDER[:num_before]
            for other in waits
        )

    return next((wait for wait in waits if is_root(wait)), waits[0] if waits else None)


def culprit(waits: Sequence[Mapping[str, Any]], ring_blocks: int = 1 << 30, is_backward: bool = False) -> str:
    """`find_culprit` in words."""
    wait = find_culprit(waits, ring_blocks, is_backward)
    if wait is None:
        return "no wait is on record"
    at = wait["peer"] if wait["peer"] >= 0 else wait["rank"]
    return (
        f"nobody will publish {wait['edge']}[{wait['index']}]: rank {wait['rank']}, {wait['stage']} task "
        f"{wait['task']}, waits for rank {at}, has {wait['have']} and wants {wait['want']}"
    )


def describe_mismatch(calls: Sequence[Call]) -> str:
    kinds = {rank: call.kind for rank, call in enumerate(calls)}
    if len(set(kinds.values())) > 1:
        names = {"schedule": "build_schedule"}
        given = ", ".join(f"rank {rank}: {names.get(kind, kind)}" for rank, kind in kinds.items())
        return (
            f"ranks make different calls at the same time ({given}); every rank makes the same calls in the same order"
        )
    differing = [
        f"{name} ({', '.join(f'rank {rank}: {call.agree.get(name)}' for rank, call in enumerate(calls))})"
        for name in calls[0].agree
        if any(call.agree.get(name) != calls[0].agree[name] for call in calls)
    ]
    if not differing:
        return f"{calls[0].kind}: ranks are not at the same call: an earlier one has not ended on every rank"
    return f"{calls[0].kind}: ranks differ in {'; '.join(differing)}; these must be the same on every rank"
