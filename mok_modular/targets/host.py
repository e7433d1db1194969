"""The host target: runs the compiled stage code for all ranks of a LocalGroup in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.call import Call, launches
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.diagnosis import culprit, describe_mismatch, find_culprit, is_mismatch_hidden
from mok_modular.protocol.errors import MoKDeadlockError, MoKPeerError, MoKSignalError, MoKTimeoutError
from mok_modular.protocol.extension import extension
from mok_modular.protocol.roster import roster
from mok_modular.protocol.swap_rules import warn_of_half_swapped
from mok_modular.protocol.trace import Trace
from mok_modular.ranks.group import LocalGroup
from mok_modular.swap import Swap
from mok_modular.targets.shared_workspace import SharedWorkspace, planted_faults


class HostWorkspace(SharedWorkspace):
    """The memory of a LocalGroup on the CPU, and the run of its calls."""

    def __init__(
        self, group: LocalGroup, config: MoKConfig, num_local_tokens: int, hidden_size: int, topk: int
    ) -> None:
        self.lost_signals: list[tuple[str, int, int, int]] = []  # edge, rank, destination rank or -1, index or -1
        self.num_switches = 0
        self._told_of: set[frozenset[str]] = set()  # the swapped stages of a backward that was warned of
        self.signal_uses: set[tuple[str, str, str]] = set()  # stage, edge, wait or publish; of traced calls
        super().__init__(group, config, num_local_tokens, hidden_size, topk)

    def _make_memory(self) -> Any:
        return extension().Workspace(self.num_ranks)

    def region(self, rank: int, name: str, dtype: torch.dtype) -> Tensor:
        """A region of a rank's memory as a flat tensor; valid until the workspace grows."""
        num_bytes = self.native.region_bytes(rank, name)
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_dlpack(self.native.region(rank, name)).view(dtype)

    def clear_trace(self) -> None:
        """Starts the trace anew."""
        self.trace = Trace("ns" if self.group.executor == "threads" else "steps")

    def interrupt(self) -> None:
        """Ends a running call (Ctrl-C)."""
        self.native.interrupt()

    def reset(self) -> list[None]:
        """New epochs for all ranks."""
        self.native.reset()
        self.failure = None
        return [None] * self.num_ranks

    def run(self, calls: Sequence[Call]) -> Sequence[BaseException | None]:
        """Runs one call of every rank to its end; returns what each rank must raise, or None."""
        if self.failure is not None:
            text = f"an earlier call on this workspace failed; call workspace.reset() on every rank ({self.failure})"
            return [RuntimeError(text.splitlines()[0]) for _ in calls]
        for fault in planted_faults:
            if (rank := max(fault["rank"], fault.get("dst_rank", -1))) >= self.num_ranks:
                text = f"a planted fault ({fault['kind']}) is of rank {rank}, the group has {self.num_ranks} ranks"
                return [ValueError(text) for _ in calls]
        if calls[0].is_backward and (swapped := frozenset(calls[0].config.stages)) not in self._told_of:
            warn_of_half_swapped(calls[0].config.stages)
            self._told_of.add(swapped)
        had_backward = self.has_backward
        self.has_backward |= any(call.is_backward for call in calls)
        shapes = [
            self.shape(call.num_local_experts, call.capacity_rows, call.intermediate_size, call.shared_size)
            for call in calls
        ]
        for call, shape in zip(calls, shapes, strict=True):
            shape.is_mxfp8 = call.is_mxfp8
        if is_mismatch_hidden(calls):
            return [MoKPeerError(describe_mismatch(calls)) for _ in calls]
        # Ranks whose calls differ run until they see it: each one's memory must hold what it works on until then.
        try:
            for shape in shapes if any(call.agree != calls[0].agree for call in calls) else shapes[:1]:
                self._reserve(shape, calls[0])
        except MemoryError:
            self.has_backward = had_backward  # else a forward would ask for it
            raise
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
            if isinstance(error, MemoryError):
                text = f"out of memory in the workers of a call, LocalGroup(num_workers={self.group.num_workers}) on "
                error = MemoryError(f"{text}{self.num_ranks} ranks")
            self.failure = RuntimeError(f"{calls[0].kind}: {type(error).__name__}: {error}")
            raise error
        self.num_switches += result["num_switches"]
        for rank, rows in enumerate(result["stats"]):
            self._add_stats(rank, rows, "backward" if calls[rank].is_backward else "forward")
        if config.trace:
            streams = [(launch.kernel, launch.stream) for launch in launches(calls[0], shapes[0])]
            names = roster().stage_names, roster().edge_names
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
            name = "start_timeout_s" if wait and roster().edge(wait["edge"]).scope == "start" else "timeout_s"
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
