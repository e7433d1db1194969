"""Ranks that are processes: a torch ProcessGroup where a LocalMember goes.

    torch.distributed.init_process_group()
    layer = MoE(..., group=torch.distributed.group.WORLD)      # or a subgroup; torch.cuda.set_device comes first

Ranks meet on the host only when something is created, grown or reset, through the group's store: any backend will do.
Calls never meet there: the words that ranks exchange on the device tell a late, a missing and a different call.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError
from mok_modular.ranks.member import Member
from mok_modular.ranks.rounds import missing_error

POLL_S = 0.005

_members: dict[int, tuple[Any, ProcessMember]] = {}  # by id of the ProcessGroup, which is kept alive with it
_num_members: dict[str, int] = {}  # how many there were of a group's name: each has keys of its own in the store


class ProcessMember(Member):
    """This process as a rank of a ProcessGroup."""

    group: ProcessRanks


class ProcessRanks:
    """The ranks of a ProcessGroup, as this process sees them: what LocalGroup is to ranks that are threads.

    device: the GPU that is current when the group is used first. Raises RuntimeError where there is none, ValueError
    where this process is no member.
    """

    def __init__(self, process_group: Any) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "a ProcessGroup needs an NVIDIA GPU on every rank, and torch sees none; ranks on CPUs live in one "
                "process: mok_modular.LocalGroup(R)"
            )
        self.process_group = process_group
        self._rank = distributed.get_rank(process_group)
        if self._rank < 0:
            raise ValueError("this process is not a member of the process group")
        self._size = distributed.get_world_size(process_group)
        self.device = f"cuda:{torch.cuda.current_device()}"
        self.workspaces: dict[Any, Any] = {}  # the cache of get_workspace
        self.num_workspaces = 0  # ever created: their names
        self.num_workers = 1  # host programs are described, never run
        name = str(process_group.group_name)
        _num_members[name] = _num_members.get(name, 0) + 1
        store = distributed.distributed_c10d._get_process_group_store(process_group)
        self._store: Any = distributed.PrefixStore(f"mok_modular/{_num_members[name]}", store)
        self._num_rounds = 0

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def global_ranks(self) -> list[int]:
        """The ranks of all members in the world, by rank in the group."""
        return list(distributed.get_process_group_ranks(self.process_group))

    def on_interrupt(self, target: Any) -> None:
        """Ctrl-C needs no help here: a call returns before its kernels run."""

    def meet(
        self,
        rank: int,
        name: str,
        payload: Any,
        act: Callable[[list[Any]], Sequence[Any]],
        timeout_s: float,
        *,
        is_checked_later: bool = False,
    ) -> Any:
        """One collective call of this rank; see LocalGroup.meet. A call that is checked later runs at once, alone:
        `act` gets this rank's payload and no other. Everybody else's are awaited on the host (timeout_s; 0: for ever).

        Raises MoKTimeoutError that names the ranks that did not come, MoKPeerError where a peer failed or makes another
        call. Payloads are pickled.
        """
        if is_checked_later:
            if isinstance(payload, Exception):
                raise payload
            result = act([payload])[0]
        else:
            result = act(self.exchange(name, payload, timeout_s))[self._rank]
        if isinstance(result, Exception):
            raise result
        return result

    def exchange(self, name: str, payload: Any, timeout_s: float) -> list[Any]:
        """Everybody's payload, by rank; an Exception is raised here, and as MoKPeerError everywhere else."""
        error = f"{type(payload).__name__}: {payload}" if isinstance(payload, Exception) else None
        sent = pickle.dumps((name, error, None if error else payload))
        try:
            received = self._round(name, sent, timeout_s)
        except MoKTimeoutError:
            if isinstance(payload, Exception):
                raise payload from None
            raise
        if isinstance(payload, Exception):
            raise payload
        arrivals = [pickle.loads(message) for message in received]
        for peer, (_, text, _) in enumerate(arrivals):
            if text is not None:
                raise MoKPeerError(f"{name}: rank {peer} raised {text}", peer)
        if len({other for other, _, _ in arrivals}) > 1:
            given = ", ".join(f"rank {peer}: {other}" for peer, (other, _, _) in enumerate(arrivals))
            raise MoKPeerError(
                f"ranks make different calls at the same time ({given}); every rank makes the same calls in the same "
                "order"
            )
        return [value for _, _, value in arrivals]

    def _round(self, name: str, message: bytes, timeout_s: float) -> list[bytes]:
        number = self._num_rounds
        self._num_rounds += 1
        keys = [f"{number}/{peer}" for peer in range(self._size)]
        missing = list(range(self._size))
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
        try:
            self._store.set(keys[self._rank], message)
            while missing:
                missing = [peer for peer in missing if not self._store.check([keys[peer]])]
                if missing and deadline is not None and time.monotonic() > deadline:
                    raise missing_error(name, {self._rank: name}, missing, timeout_s)
                if missing:
                    time.sleep(POLL_S)
            received = [self._store.get(key) for key in keys]
            if number > 0:  # everybody has come here, so everybody has read the round before
                self._store.delete_key(f"{number - 1}/{self._rank}")
        except RuntimeError as error:
            if isinstance(error, MoKTimeoutError):
                raise
            raise MoKPeerError(f"{name}: the store of the process group is gone ({error})") from error
        return received

    # ---- reports: what a rank says about a failure, for whoever asks ----

    def post(self, key: str, report: Any) -> None:
        """Leaves a report; nothing happens where the store is gone."""
        try:
            self._store.set(f"report/{key}/{self._rank}", pickle.dumps(report))
        except RuntimeError:
            return

    def reports(self, key: str, ranks: Sequence[int], patience_s: float) -> dict[int, Any]:
        """The reports of `ranks` that are there, or come within patience_s."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience_s
        try:
            while True:
                for rank in ranks:
                    name = f"report/{key}/{rank}"
                    if rank not in found and self._store.check([name]):
                        found[rank] = pickle.loads(self._store.get(name))
                if len(found) == len(ranks) or time.monotonic() > deadline:
                    return found
                time.sleep(POLL_S)
        except RuntimeError:
            return found

    def decide(self, key: str, proposal: str) -> str:
        """The first proposal that any rank made under this key; "" where the store is gone."""
        try:
            return str(self._store.compare_set(f"decision/{key}", "", proposal).decode())
        except RuntimeError:
            return ""


def process_member(process_group: Any) -> ProcessMember:
    """The member for a ProcessGroup: the same object as long as the group is the same. Raises as ProcessRanks does."""
    found = _members.get(id(process_group))
    if found is None:
        ranks = ProcessRanks(process_group)
        found = _members[id(process_group)] = (process_group, ProcessMember(ranks, ranks.rank()))
    return found[1]
