"""Groups of ranks that live in this process.

    group = LocalGroup(4)
    outs = group.run(step)      # step(member) once per rank, each in a thread, as a torchrun process would

A member has `rank()` and `size()` as a ProcessGroup has and goes wherever one goes. Collective calls meet in
rounds: the n-th collective call of every member is one round. A round ends for everybody when all have come,
when one of them brings an error, when one has returned without coming, or when `start_timeout_s` is over.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError
from mok_modular.ranks.member import Member
from mok_modular.ranks.process_group import process_member

T = TypeVar("T")

ORDERS = ("round_robin", "random", "last_first")
EXECUTORS = ("fibers", "threads")
DEFAULT_NUM_WORKERS = 4
INTERRUPT_PATIENCE_S = 5.0
"""How long Ctrl-C waits for members that are in code of their own."""


@dataclass
class _Round:
    arrivals: dict[int, tuple[str, Any]] = field(default_factory=dict)
    is_checked_later: bool = True
    results: list[Any] | None = None
    error: Callable[[int], Exception] | None = None
    num_left: int = 0


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
        self._condition = threading.Condition()
        self._rounds: dict[int, _Round] = {}
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

        The caller's grad and inference modes hold in the members too.

        Re-raises the exception of the rank that caused the failure (not those of its peers, which only saw
        it), with the rank in a note. Ctrl-C ends running calls and is re-raised; members that are busy with
        something else for longer than INTERRUPT_PATIENCE_S are left behind, and their later calls fail.
        Raises RuntimeError while the group runs already, from a member or from another thread.
        """
        results: list[Any] = [None] * self._size
        errors: list[BaseException | None] = [None] * self._size
        is_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with self._condition:
            if self._run_idx % 2:
                raise RuntimeError("this group is running already: run can neither be nested nor called twice at once")
            self._run_idx += 1
            run_idx = self._run_idx

        def body(rank: int) -> None:
            self._local.run_idx, self._local.rank = run_idx, rank
            try:
                with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
                    results[rank] = fn(self.members[rank])
                self._finish(run_idx, rank, "returned")
            except Exception as error:
                errors[rank] = error
                self._finish(run_idx, rank, error)
            except BaseException as error:
                errors[rank] = error
                self._finish(run_idx, rank, RuntimeError(repr(error)))

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"mok-rank-{rank}", daemon=True)
            for rank in range(self._size)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.2)  # short, so that Ctrl-C is seen
        except BaseException:  # KeyboardInterrupt, or what another signal's handler raises
            self._interrupt()
            deadline = time.monotonic() + INTERRUPT_PATIENCE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(timeout=max(0.0, deadline - time.monotonic()))
            raise
        finally:
            # Ranks that stopped at different calls start the next run together.
            with self._condition:
                self._run_idx = run_idx + 1
                self._rounds.clear()
                self._num_calls = [0] * self._size
                self._outcomes = [None] * self._size
        self._raise_first(errors)
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
        with self._condition:
            self._check_thread(rank, name)
            number = self._num_calls[rank]
            self._num_calls[rank] += 1
            this = self._rounds.setdefault(number, _Round())
            this.arrivals[rank] = (name, payload)
            this.is_checked_later &= is_checked_later
            if isinstance(payload, Exception) and this.error is None:
                this.error = _peer_error(rank, payload)
            elif this.error is None and len(this.arrivals) == self._size:
                self._act(this, act)
            self._condition.notify_all()
            deadline = time.monotonic() + timeout_s if timeout_s > 0 else None
            while this.results is None and this.error is None:
                if self._see_finished(this):
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._time_out(this, timeout_s)
                    break
                self._condition.wait(timeout=left)
            this.num_left += 1
            if this.num_left == self._size:
                del self._rounds[number]
        if isinstance(payload, Exception):
            raise payload
        if this.error is not None:
            raise this.error(rank)
        assert this.results is not None
        result = this.results[rank]
        if isinstance(result, BaseException):
            raise result
        return result

    def _act(self, this: _Round, act: Callable[[list[Any]], Sequence[Any]]) -> None:
        names = [this.arrivals[rank][0] for rank in range(self._size)]
        payloads = [this.arrivals[rank][1] for rank in range(self._size)]
        if len(set(names)) > 1 and not this.is_checked_later:
            given = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            text = f"ranks make different calls at the same time ({given}); "
            text += "every rank makes the same calls in the same order"
            this.error = lambda _: MoKPeerError(text)
            return
        try:
            this.results = list(act(payloads))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            this.results = [_copy_of(error, text) for _ in names]

    def _see_finished(self, this: _Round) -> bool:
        """A member that has returned, or failed, will never come."""
        for rank, outcome in enumerate(self._outcomes):
            if outcome is None or rank in this.arrivals:
                continue
            if isinstance(outcome, Exception):
                this.error = _peer_error(rank, outcome)
            else:
                waiting = ", ".join(f"rank {r} in {this.arrivals[r][0]}" for r in sorted(this.arrivals))
                this.error = _left_error(rank, self._num_calls[rank], waiting)
            self._condition.notify_all()
            return True
        return False

    def _time_out(self, this: _Round, timeout_s: float) -> None:
        missing = [rank for rank in range(self._size) if rank not in this.arrivals]
        calls = {rank: name for rank, (name, _) in sorted(this.arrivals.items())}
        waits = [
            {
                "rank": rank,
                "stage": name,
                "edge": "entered",
                "index": peer,
                "have": 0,
                "want": 1,
                "peer": peer,
            }
            for rank, name in calls.items()
            for peer in missing
        ]
        this.error = lambda rank: MoKTimeoutError(
            f"{calls.get(rank, 'a collective call')}: no call from rank {', '.join(map(str, missing))} within "
            f"start_timeout_s={timeout_s:g} s",
            waits,
        )
        self._condition.notify_all()

    def _finish(self, run_idx: int, rank: int, outcome: Exception | str) -> None:
        with self._condition:
            if run_idx == self._run_idx:
                self._outcomes[rank] = outcome
                self._condition.notify_all()

    def _check_thread(self, rank: int, name: str) -> None:
        run_idx = getattr(self._local, "run_idx", None)  # None: no member's thread, or one that a member started
        if run_idx is None:
            if self._size > 1 and self._run_idx % 2 == 0:
                raise RuntimeError(f"{name}: members of a group of {self._size} ranks work inside LocalGroup.run only")
        elif run_idx != self._run_idx:
            raise MoKPeerError(f"{name}: the run that this thread belongs to was interrupted")
        elif rank != self._local.rank:
            raise RuntimeError(f"{name}: rank {self._local.rank} uses the member (or a workspace) of rank {rank}")

    def _interrupt(self) -> None:
        self._run_idx += 1  # members that come to their next call only now fail there
        while True:
            for target in list(self._interruptible):
                target.interrupt()
            if self._condition.acquire(timeout=0.05):  # else a call is running
                break
        try:
            for this in self._rounds.values():
                if this.results is None and this.error is None:
                    this.error = lambda _: MoKPeerError("interrupted")
            self._condition.notify_all()
        finally:
            self._condition.release()

    @staticmethod
    def _raise_first(errors: Sequence[BaseException | None]) -> None:
        raised = [(rank, error) for rank, error in enumerate(errors) if error is not None]
        if not raised:
            return
        # Not what a peer saw of it, nor what was made of that.
        causes = [(rank, error) for rank, error in raised if not _is_consequence(error)]
        others = [(rank, error) for rank, error in raised if not isinstance(error, MoKPeerError)]
        rank, error = (causes or others or raised)[0]
        error.add_note(f"on rank {rank} of {len(errors)}")
        raise error


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


def _peer_error(rank: int, cause: Exception) -> Callable[[int], Exception]:
    try:
        text = f"rank {rank} raised {type(cause).__name__}: {cause}"
    except Exception:  # a user's exception may be unable to say anything
        text = f"rank {rank} raised {type(cause).__name__}"
    if isinstance(cause, MoKPeerError):  # it only saw the failure of another: name that one
        text = str(cause)
        rank = cause.rank if cause.rank is not None else rank
    return lambda _: MoKPeerError(text, rank=rank)


def _left_error(rank: int, num_calls: int, waiting: str) -> Callable[[int], Exception]:
    text = f"rank {rank} returned after {num_calls} collective calls; its peers made another one: {waiting}"
    return lambda _: MoKPeerError(text, rank=rank)


def _copy_of(error: Exception, text: str) -> Exception:
    """An own exception object for each rank, so that notes and tracebacks do not mix."""
    try:
        copied = copy.copy(error)
    except Exception:
        copied = RuntimeError(text)
    copied.__cause__ = error
    return copied


def _is_consequence(error: BaseException) -> bool:
    """A MoKPeerError, or raised from or while handling one."""
    seen: set[int] = set()
    this: BaseException | None = error
    while this is not None and id(this) not in seen:
        if isinstance(this, MoKPeerError):
            return True
        seen.add(id(this))
        this = this.__cause__ or this.__context__
    return False


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {value}")
