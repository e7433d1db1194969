"""The CUDA target for ranks that are processes: one rank a process, symmetric memory by NVSHMEM.

A call enqueues this rank's kernels and returns; nothing meets on the host. The words that ranks exchange carry the
call's number, kind and fingerprint, so that kernels see a late rank, a missing one and a different call. What they
leave is raised by the next call or by `check()`, with what the peers report through the group's store.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mok_modular.protocol.call import Call
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.diagnosis import culprit
from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError
from mok_modular.protocol.extension import extension
from mok_modular.ranks.process_group import ProcessRanks
from mok_modular.targets.cuda import device as cuda_device
from mok_modular.targets.cuda import device_library, nvrtc, nvshmem
from mok_modular.targets.cuda import trace as cuda_trace
from mok_modular.targets.cuda.memory import open_waits
from mok_modular.targets.cuda.symmetric import ProcessMemory
from mok_modular.targets.cuda.workspace import CudaWorkspace

HANDSHAKE = nvrtc.Kernel("split/handshake.cu", ("mok_handshake",))
HANDSHAKE_TIMEOUT_S = 10.0
REPORT_PATIENCE_S = 3.0
"""How long a failing rank waits for what its peers have to say about the failure."""
OWN_PATIENCE_S = 1.0
"""The same where this rank knows enough already, and the others only add to the table of waits."""


class ProcessWorkspace(CudaWorkspace):
    """One rank's memory and kernels. Creation is collective and ends with a round of signals between all pairs."""

    native: ProcessMemory

    def __init__(
        self, ranks: ProcessRanks, config: MoKConfig, num_local_tokens: int, hidden_size: int, topk: int
    ) -> None:
        self._number = ranks.num_workspaces
        ranks.num_workspaces += 1
        self._recent: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=4)  # calls: order, kind, agreement
        super().__init__(ranks, config, num_local_tokens, hidden_size, topk)
        self._handshake()

    def _open(self, group: Any, config: MoKConfig) -> None:
        self._ranks: ProcessRanks = group
        self.ranks = (group.rank(),)
        self._timeout_s = config.start_timeout_s
        self.timeout_factor = self._num_ranks_per_gpu(config)
        self.runtime = nvshmem.start(group, self._timeout_s)
        self.runtime.is_shared_gpu |= self.timeout_factor > 1
        error: Exception | None = None
        try:
            self.device = cuda_device.get_device(self.torch_device.index or 0)
            with torch.cuda.device(self.torch_device):
                self.functions = self._load(config.signals)
                self._signals = config.signals
                if config.trace:
                    self._traced = self._load(config.signals, is_traced=True)
                self._warm_up([*self.functions.values(), *self._traced.values(), *self._load_persistent(config)])
        except Exception as caught:
            error = caught
        group.exchange("loading kernels", error, self._timeout_s)

    def _num_ranks_per_gpu(self, config: MoKConfig) -> int:
        properties = torch.cuda.get_device_properties(self.torch_device)
        gpu = f"{socket.gethostname()}, {properties.name} {properties.uuid}"
        gpus = self._ranks.exchange("GPUs", gpu, self._timeout_s)
        shared = {each: [rank for rank, other in enumerate(gpus) if other == each] for each in gpus}
        for each, ranks in shared.items():
            if len(ranks) > 1 and not config.allow_shared_gpu:
                raise ValueError(
                    f"ranks {', '.join(map(str, ranks))} share a GPU ({each}): call torch.cuda.set_device first, or, "
                    "for tests, set MoKConfig(allow_shared_gpu=True)"
                )
        return max(len(ranks) for ranks in shared.values())

    def _load_traced(self) -> Mapping[str, cuda_device.Function]:
        return self._load(self._signals, is_traced=True)

    def _load(self, signals: str, is_traced: bool = False) -> dict[str, cuda_device.Function]:
        """The kernels of this workspace: the device's, but for what links want otherwise; with `nvshmem` signals others
        in place of those without products. The handshake has no timeline."""
        functions = dict(self.device.traced_functions() if is_traced else self.device.functions)
        kernels = [*cuda_device.link_kernels().values()]
        if signals == "nvshmem":
            kernels = [*(cuda_device.copy_kernels() | cuda_device.link_kernels()).values()]
        for kernel in map(cuda_device.traced, kernels) if is_traced else (*kernels, HANDSHAKE):
            if signals == "direct":
                functions |= self.device.load(kernel)
                continue
            arch = self.device.arch
            cubin = device_library.compile_kernel(arch.name, kernel, arch.defines)
            loaded, module = cuda_device.load_kernel(arch, kernel, cubin)
            self.runtime.init_module(int(module))
            functions |= loaded
        return functions

    def _warm_up(self, functions: Iterable[cuda_device.Function]) -> None:
        """Launches every kernel once, for no call: what the driver does at a first launch would make a rank late inside
        a call."""
        sizes = extension().struct_sizes()
        empty = [bytes(sizes["CallSet"]), bytes(sizes["Launch"])]
        maps = bytes(sizes["Maps"])
        for function in functions:
            arguments = [*empty, maps] if function.has_maps else [*empty]
            if function.is_traced:
                arguments.append(bytes(cuda_trace.SINK_BYTES))
            self._launch(function, arguments, torch.cuda.current_stream().cuda_stream, 1)
        torch.cuda.synchronize()

    def _make_memory(self) -> Any:
        return ProcessMemory(self._ranks, self.runtime, self.torch_device, self._timeout_s)

    @property
    def key(self) -> Any:
        return self._number

    def _handshake(self) -> None:
        """Tests signals between all pairs; the words that it leaves are where calls start from."""
        (rank,) = self.ranks
        call = Call("schedule", self.config.plan, 0, 1, self.row_block, {}, {}, {}, config=self.config)
        program = self._program(rank, call, self._smallest_shape())
        error: Exception | None = None
        try:
            with torch.cuda.device(self.torch_device):
                torch.cuda.synchronize()
                self._ranks.exchange("handshake", None, self._timeout_s)
                call_set = self._pack_calls([program], HANDSHAKE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S)
                launch = extension().pack_launch(program, 0)
                function = self.functions["handshake"]
                stream = torch.cuda.current_stream()
                self._launch(function, [call_set, launch], stream.cuda_stream, 1)
                stream.synchronize()
            failure = self.native.failure(0)
            if failure["is_set"]:
                error = MoKTimeoutError(
                    f"signals from rank {failure['peer']} do not reach rank {rank}", open_waits([failure])
                )
        except MoKTimeoutError:
            raise
        except Exception as caught:
            error = caught
        self._order = self.native.epochs()[2] if error is None else 0
        self.runtime.is_healthy = error is None
        self._ranks.exchange("handshake's end", error, self._timeout_s)

    # ---- calls ----

    def run(self, calls: Sequence[Call]) -> list[Exception | None]:
        (call,) = calls
        try:
            errors = super().run(calls)
        except Exception as error:
            self.tell_peers(call.kind, error)
            raise
        if errors[0] is None:
            self._order += 1
            self._recent.append((self._order, call.kind, dict(call.agree)))
        return errors

    def tell_peers(self, name: str, error: Exception) -> None:
        """Ends the calls of all ranks: this one cannot make its part. The workspace needs a reset then."""
        if self.failure is None:
            self._report("error", f"{name}: rank {self._rank} raised {type(error).__name__}: {error}")
            self.native.set_abort_words(self._smallest_shape(), range(self.num_ranks))
            self.failure = RuntimeError(
                f"an earlier call failed on this rank; call workspace.reset() on every rank ({name}: {error})"
            )

    @property
    def _rank(self) -> int:
        return self.ranks[0]

    @property
    def _report_key(self) -> str:
        return f"{self._number}/{self.native.generation}"

    def _report(self, reason: str, text: str, waits: Sequence[Mapping[str, Any]] = (), raised_by: int = -1) -> None:
        """Says what happened here, to peers that ask."""
        report = {"reason": reason, "text": text, "waits": list(waits), "raised_by": raised_by}
        self._ranks.post(self._report_key, report)

    def _explain(self, failures: Sequence[Mapping[str, Any]]) -> Exception | None:
        (failure,) = failures
        error = super()._explain(failures)
        if not failure["is_set"]:
            if error is not None:  # ids out of range: only this rank saw them
                self.tell_peers("build_schedule", error)
            return error
        self.runtime.is_healthy = False
        self._ranks.post(f"{self._report_key}/calls", list(self._recent))
        waits, reason = open_waits(failures), failure["reason"]
        if reason == "aborted":
            self._report(reason, "", waits, failure["raised_by"])
            return self._aborted(failure["raised_by"], waits)
        if reason == "timeout":
            self._report(reason, "", waits)
            others = [rank for rank in range(self.num_ranks) if rank != self._rank]
            return self._timeout(waits, self._ranks.reports(self._report_key, others, OWN_PATIENCE_S))
        if reason == "mismatch":
            error = self._mismatch(failure)
        self._report(reason, str(error))
        return error

    def _aborted(self, raiser: int, waits: Sequence[Mapping[str, Any]]) -> Exception:
        """The error of a rank whose call another one ended. That rank may have seen the end of a third one first, and
        noted no more than that."""
        asked: dict[int, Any] = {}
        while raiser >= 0 and raiser != self._rank and raiser not in asked:
            asked[raiser] = self._ranks.reports(self._report_key, [raiser], REPORT_PATIENCE_S).get(raiser)
            report = asked[raiser]
            if report is None:
                return MoKPeerError(f"rank {raiser} ended the call, and has not said why", raiser)
            if report["reason"] == "timeout":
                return self._timeout(waits, asked)
            if report["reason"] != "aborted":
                return MoKPeerError(report["text"], raiser)
            raiser = report["raised_by"]
        return MoKPeerError(f"rank {max(asked, default=raiser)} ended the call, and has not said why")

    def _timeout(self, waits: Sequence[Mapping[str, Any]], reports: Mapping[int, Any]) -> Exception:
        rows = [*waits, *(wait for rank in sorted(reports) for wait in reports[rank]["waits"])]
        rows.sort(key=lambda wait: wait["rank"])
        return MoKTimeoutError(f"a wait expired in an earlier call; {culprit(rows)}", rows)

    def _mismatch(self, failure: Mapping[str, Any]) -> Exception:
        peer, order = failure["peer"], failure["order"]
        if failure["own_call"] != failure["peer_call"]:
            return MoKPeerError(
                f"ranks make different calls at the same time (rank {self._rank}: {failure['own_call']}, rank {peer}: "
                f"{failure['peer_call']}); every rank makes the same calls in the same order",
                peer,
            )
        calls = self._ranks.reports(f"{self._report_key}/calls", [peer], REPORT_PATIENCE_S).get(peer, [])
        mine, theirs = _agreement(self._recent, order), _agreement(calls, order)
        differing = [
            f"{name} (rank {self._rank}: {mine[name]}, rank {peer}: {theirs[name]})"
            for name in mine
            if name in theirs and mine[name] != theirs[name]
        ]
        what = "; ".join(differing) or "an argument"
        return MoKPeerError(
            f"{failure['own_call']}: ranks differ in {what}; these must be the same on every rank", peer
        )

    def reset(self) -> list[None]:
        """Collective: every rank is here already (Workspace.reset meets first)."""
        if self.failure is None:
            self.native.set_abort_words(self._smallest_shape(), [self._rank])  # kernels that still wait end at once
        torch.cuda.synchronize(self.torch_device)
        epochs = self._ranks.exchange("reset", self.native.epochs(), self._timeout_s)
        self.native.reset_to([max(values) + 1 for values in zip(*epochs, strict=True)])
        self.failure = None
        self._recent.clear()
        self._handshake()
        return [None] * self.num_ranks


def _agreement(calls: Iterable[tuple[int, str, dict[str, Any]]], order: int) -> dict[str, Any]:
    """What had to agree in the call of this number, {} if it is not on record."""
    return next((agree for number, _, agree in calls if number == order), {})
