"""Groups of ranks that live in this process.

    group = LocalGroup(4)
    outs = group.run(step)      # step(member) once per rank, each in a thread, as a torchrun process would

A member has `rank()` and `size()` as a ProcessGroup has and goes wherever one goes. Members take turns (turns.py).
Collective calls meet in rounds: the n-th collective call of every member is one round. A round ends for everybody when
all have come, when one of them brings an error, when one has returned without coming, or when one is late by
`start_timeout_s`.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from mok_modular.protocol.errors import MoKPeerError
from mok_modular.ranks.member import Member
from mok_modular.ranks.member_state import CallerState
from mok_modular.ranks.process_group import process_member
from mok_modular.ranks.rounds import Round, peer_error, raise_first
from mok_modular.ranks.turns import TURNS, Turn, current_turn

T = TypeVar("T")

ORDERS = ("round_robin", "random", "last_first")
EXECUTORS = ("fibers", "threads")
DEFAULT_NUM_WORKERS = 4
INTERRUPT_PATIENCE_S = 5.0
"""How long Ctrl-C waits for members that are in code of their own."""
WATCH_INTERVAL_S = 0.05
"""How often a run looks for late members and for a turn that does not go on."""


class LocalGroup:
    """`size` CPU ranks in this process.

    order: who goes on at a wait when several ranks could: `round_robin`, `random` (by `seed`), `last_first`.
    executor: `fibers` (deterministic, one OS thread, sees deadlocks) or `threads` (concurrent; waits end by
    `MoKConfig.timeout_s`). num_workers: workers per kernel and rank, at least 1.

    Raises TypeError or ValueError that names the argument and the rule.
    """

    def __init__(
        self,
        size: int,
        device: str = "cpu",
        order: str = "round_robin",
        seed: int = 0,
        executor: str = "fibers",
        num_workers: int | None = None,
    ) -> None:
        _check_int("size", size, 1, 128)
        if str(device) != "cpu" and not str(device).startswith("cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda:<index>', got {device!r}")
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
        if executor not in EXECUTORS:
            raise ValueError(f"executor must be one of {EXECUTORS}, got {executor!r}")
        _check_int("seed", seed, 0, 2**64 - 1)
        if num_workers is not None:
            _check_int("num_workers", num_workers, 1, 256)
        self._size = size
        self.device = str(device)
        self.order = order
        self.seed = seed
        self.executor = executor
        self.num_workers = num_workers if num_workers is not None else DEFAULT_NUM_WORKERS
        self.members = tuple(LocalMember(self, rank) for rank in range(size))
        self._lock = threading.RLock()
        self._turns: list[Turn] = []  # by rank, while a run is going on
        self._rounds: dict[int, Round] = {}
        self._num_calls = [0] * size
        self._outcomes: list[Exception | str | None] = [None] * size  # how a member's function ended
        self._run_idx = 0  # even: no run is going on
        self._local = threading.local()  # of a member's thread: the run that it belongs to, and its rank
        self.workspaces: dict[Any, Any] = {}  # the cache of get_workspace: it lives and dies with the group
        self._interruptible: weakref.WeakSet[Any] = weakref.WeakSet()

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def run(self, fn: Callable[[LocalMember], T]) -> list[T]:
        """Runs `fn(member)` once per rank, each in a thread of its own; returns the results by rank.

        Members behave like forked processes. Each has random generators of its own (torch's on the CPU and on GPUs,
        those of `random` and NumPy), a default dtype and settings of anomaly mode and scaled_dot_product_attention,
        which start from the caller's: so all ranks draw the same numbers until they are seeded by rank. Grad and
        inference mode, autocast, torch's modes (a default device, FlopCounterMode), a running torch.profiler, context
        variables, and the current CUDA device and stream are those of the caller. What members share is memory: a
        tensor or a module of the caller is the same object in each of them.

        One member runs Python at a time. The others' turns come, by rank, where it waits in a collective call or ends,
        so with the same seeds a run gives the same numbers as another run, and as processes. A member that waits in any
        other way (a threading.Barrier, a queue, a lock, time.sleep) keeps its turn for 0.2 s (turns.PATIENCE_S); then
        others run, and it goes on when it gets a turn again. Every member still draws its own numbers then, but the
        order of turns depends on time, and so does what they do to objects that they share. member.all_reduce([]) is a
        barrier without that delay. Threads that a member starts share its turn; the other threads of the process use
        the generators of the member that runs.

        Afterwards the caller's generators are where rank 0 left its own, so one rank draws what a plain call draws, and
        the next run draws other numbers. Its settings are as before; where run raises, so are its generators.

        Re-raises the exception of the rank that caused the failure (not those of its peers, which only saw
        it), with the rank in a note. Ctrl-C ends running calls and is re-raised; members that are busy with
        something else for longer than INTERRUPT_PATIENCE_S are left behind, and their later calls fail.
        Raises RuntimeError while the group runs already, from a member or from another thread.
        """
        results: list[Any] = [None] * self._size
        errors: list[BaseException | None] = [None] * self._size
        if torch.device(self.device).type == "cuda" and torch.cuda.is_available():
            torch.cuda.init()  # seeds that members set before it would all be used when the first one initialises it
        caller_state = CallerState()
        caller = current_turn()
        if caller is not None and caller.is_closed:  # of a run that was interrupted
            caller = None
        with self._lock:
            if self._run_idx % 2:
                raise RuntimeError("this group is running already: run can neither be nested nor called twice at once")
            self._run_idx += 1
            run_idx = self._run_idx
        turns = self._turns = [Turn() for _ in range(self._size)]
        num_running, all_ended = self._size, threading.Event()

        def body(rank: int) -> None:
            nonlocal num_running
            self._local.run_idx, self._local.rank = run_idx, rank
            TURNS.enter(turns[rank])
            try:
                if self._run_idx != run_idx:  # interrupted before its first turn
                    raise MoKPeerError("interrupted")
                with caller_state.applied():
                    results[rank] = fn(self.members[rank])
                self._finish(run_idx, rank, "returned")
            except Exception as error:
                errors[rank] = error
                self._finish(run_idx, rank, error)
            except BaseException as error:
                errors[rank] = error
                self._finish(run_idx, rank, RuntimeError(repr(error)))
            finally:
                with self._lock:
                    num_running -= 1
                    if num_running == 0:
                        all_ended.set()
                TURNS.end(turns[rank])

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(body, rank), name=f"mok-rank-{rank}", daemon=True
            )
            for rank in range(self._size)
        ]
        is_ok = False
        try:
            TURNS.open(turns, caller)
            for thread in threads:
                thread.start()
            while not all_ended.wait(WATCH_INTERVAL_S):  # a short wait, so that Ctrl-C is seen
                self._watch()
            for thread in threads:
                thread.join()
            is_ok = all(error is None for error in errors)
        except BaseException:  # KeyboardInterrupt, or what another signal's handler raises
            self._interrupt(turns)
            deadline = time.monotonic() + INTERRUPT_PATIENCE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(timeout=max(0.0, deadline - time.monotonic()))
            raise
        finally:
            # Ranks that stopped at different calls start the next run together.
            with self._lock:
                self._run_idx = run_idx + 1
                self._end_rounds("the run has ended")
                self._rounds.clear()
                self._num_calls = [0] * self._size
                self._outcomes = [None] * self._size
                self._turns = []
            TURNS.close(turns, caller, is_ok=is_ok)
        raise_first(errors)
        return results

    def on_interrupt(self, target: Any) -> None:
        """Registers an object whose `interrupt()` Ctrl-C must call to end a running call; it is not kept alive."""
        self._interruptible.add(target)

    # ---- rounds ----

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
        """One collective call of `rank`. The last to come runs `act(payloads by rank)`, which returns what each
        rank gets: a value, or an exception that is raised there. A payload that is an Exception is raised here
        and ends the round for everybody else with a MoKPeerError. So do calls of different names, unless `act`
        sees for itself that they differ (`is_checked_later`, on every rank).

        Raises RuntimeError for another member's thread, or outside of `run` where there are other ranks.
        """
        with self._lock:
            self._check_thread(rank, name)
            turn = self._turns[rank] if self._turns else None  # None: one rank, outside of run
        if turn is not None:
            TURNS.take(turn)  # a thread that a member has started may come without
        with self._lock:
            self._check_thread(rank, name)
            number = self._num_calls[rank]
            self._num_calls[rank] += 1
            this = self._rounds.setdefault(number, Round())
            this.arrivals[rank] = (name, payload)
            this.is_checked_later &= is_checked_later
            if isinstance(payload, Exception) and this.error is None:
                this.error = peer_error(rank, payload)
            elif this.error is None and len(this.arrivals) == self._size:
                self._act(this, act, turn)
            else:
                this.see_ended(self._outcomes, self._num_calls)
            is_waiting = not this.is_over()
            if is_waiting:
                this.waiting[rank] = timeout_s
            else:
                self._announce(this)
        if is_waiting:
            assert turn is not None
            TURNS.leave(turn)
            TURNS.wait(turn, this.is_over)
        with self._lock:
            this.num_left += 1
            if this.num_left == self._size:
                self._rounds.pop(number, None)
        if isinstance(payload, Exception):
            raise payload
        if this.error is not None:
            raise this.error(rank)
        assert this.results is not None
        result = this.results[rank]
        if isinstance(result, BaseException):
            raise result
        return result

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """For a call that one member runs for all: inside, random numbers are drawn from the generators of `rank`."""
        return TURNS.lent(self._turns[rank]) if self._turns else nullcontext()

    def _act(self, this: Round, act: Callable[[list[Any]], Sequence[Any]], turn: Turn | None) -> None:
        if turn is not None:
            turn.is_acting = True
        try:
            this.act(self._size, act)
        finally:
            if turn is not None:
                turn.is_acting = False

    def _announce(self, this: Round) -> None:
        """The ranks that wait in a round which is over can go on when their turn comes."""
        for rank in sorted(this.waiting):
            TURNS.announce(self._turns[rank])
        this.waiting.clear()

    def _finish(self, run_idx: int, rank: int, outcome: Exception | str) -> None:
        with self._lock:
            if run_idx == self._run_idx:
                self._outcomes[rank] = outcome
                for this in self._rounds.values():
                    if not this.is_over():
                        this.see_ended(self._outcomes, self._num_calls)
                    if this.is_over():
                        self._announce(this)

    def _watch(self) -> None:
        """Ends the waits for a late member, and takes the turn from one that does not go on."""
        if self._lock.acquire(timeout=WATCH_INTERVAL_S):  # else a call is running
            try:
                own_s = [turn.own_s() for turn in self._turns]
                for this in self._rounds.values():
                    late = [] if this.is_over() else this.late_ranks(own_s)
                    if late:
                        self._announce(this)
                    for rank in late:
                        TURNS.take_from(self._turns[rank])
            finally:
                self._lock.release()
        TURNS.watch()

    def _check_thread(self, rank: int, name: str) -> None:
        run_idx = getattr(self._local, "run_idx", None)  # None: no member's thread, or one that a member started
        if run_idx is None:
            if self._size > 1 and self._run_idx % 2 == 0:
                raise RuntimeError(f"{name}: members of a group of {self._size} ranks work inside LocalGroup.run only")
        elif run_idx != self._run_idx:
            raise MoKPeerError(f"{name}: the run that this thread belongs to was interrupted")
        elif rank != self._local.rank:
            raise RuntimeError(f"{name}: rank {self._local.rank} uses the member (or a workspace) of rank {rank}")

    def _interrupt(self, turns: Sequence[Turn]) -> None:
        self._run_idx += 1  # members that come to their next call only now fail there
        while True:
            for target in list(self._interruptible):
                target.interrupt()
            if self._lock.acquire(timeout=0.05):  # else a call is running
                break
        try:
            self._end_rounds("interrupted")
        finally:
            self._lock.release()
        TURNS.abandon(turns)

    def _end_rounds(self, text: str) -> None:
        for this in self._rounds.values():
            if not this.is_over():
                this.error = lambda _: MoKPeerError(text)


class LocalMember(Member):
    """One rank of a LocalGroup, as its functions see it."""

    def all_reduce(self, tensors: Sequence[torch.Tensor], start_timeout_s: float = 300) -> None:
        """Replaces every tensor by its sum over the ranks, added up in the order of the ranks: for what each rank has a
        copy of, such as the shared expert's gradients. Collective; torch.distributed does this for a ProcessGroup.

        Raises ValueError on every rank if shapes or dtypes differ.
        """

        def act(parts: list[Sequence[torch.Tensor]]) -> Sequence[Any]:
            kinds = [[(tuple(t.shape), t.dtype) for t in part] for part in parts]
            if any(kind != kinds[0] for kind in kinds):
                raise ValueError(f"all_reduce: shapes and dtypes must be the same on every rank, got {kinds}")
            sums = [part[0].clone() for part in zip(*parts, strict=True)]
            for part in parts[1:]:
                for total, tensor in zip(sums, part, strict=True):
                    total += tensor
            return [sums] * len(parts)

        given = [tensor.detach() for tensor in tensors]
        sums = self.group.meet(self.rank(), "all_reduce", given, act, start_timeout_s)
        for tensor, total in zip(given, sums, strict=True):
            tensor.copy_(total)


def as_member(group: Any) -> Member:
    """The member that a caller means: a member, a torch ProcessGroup, or a LocalGroup of one rank.

    Raises TypeError or ValueError; RuntimeError for a ProcessGroup where there is no GPU.
    """
    if isinstance(group, Member):
        return group
    if isinstance(group, LocalGroup):
        if group.size() != 1:
            raise ValueError(
                f"group has {group.size()} ranks: pass the member that LocalGroup.run gives to each rank's function"
            )
        return group.members[0]
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        return process_member(group)
    raise TypeError(
        "group must be a LocalMember, a LocalGroup of one rank or a torch.distributed ProcessGroup, got "
        f"{type(group).__name__}"
    )


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {value}")
