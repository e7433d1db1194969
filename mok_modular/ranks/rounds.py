"""Rounds of collective calls: the n-th collective call of every member of a LocalGroup is one round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError


@dataclass
class Round:
    """One collective call of every rank.

    arrivals: name of the call and what the rank brings, by rank. waiting: start_timeout_s of the ranks that wait here.
    begin_s: the own seconds of all ranks (Turn.own_s) when `late_ranks` first saw a rank waiting.
    """

    arrivals: dict[int, tuple[str, Any]] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)
    begin_s: dict[int, Sequence[float]] = field(default_factory=dict)
    is_checked_later: bool = True
    results: list[Any] | None = None
    error: Callable[[int], Exception] | None = None
    num_left: int = 0

    def is_over(self) -> bool:
        """Whether no rank waits here any more."""
        return self.results is not None or self.error is not None

    def act(self, size: int, act: Callable[[list[Any]], Sequence[Any]]) -> None:
        """Runs the call, when all ranks have come."""
        names = [self.arrivals[rank][0] for rank in range(size)]
        payloads = [self.arrivals[rank][1] for rank in range(size)]
        if len(set(names)) > 1 and not self.is_checked_later:
            given = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            text = f"ranks make different calls at the same time ({given}); "
            text += "every rank makes the same calls in the same order"
            self.error = lambda _: MoKPeerError(text)
            return
        try:
            self.results = list(act(payloads))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.results = [_copy_of(error, text) for _ in names]

    def see_ended(self, outcomes: Sequence[Exception | str | None], num_calls: Sequence[int]) -> None:
        """A member that has returned, or failed, will never come. outcomes: how members have ended, None if they have
        not."""
        for rank, outcome in enumerate(outcomes):
            if outcome is None or rank in self.arrivals:
                continue
            if isinstance(outcome, Exception):
                self.error = peer_error(rank, outcome)
            else:
                waiting = ", ".join(f"rank {r} in {self.arrivals[r][0]}" for r in sorted(self.arrivals))
                self.error = _left_error(rank, num_calls[rank], waiting)
            return

    def late_ranks(self, own_s: Sequence[float]) -> list[int]:
        """The ranks that have not come although they had more time of their own than a waiting rank's start_timeout_s;
        then the round ends with a MoKTimeoutError."""
        missing = [rank for rank in range(len(own_s)) if rank not in self.arrivals]
        for waiting, timeout_s in self.waiting.items():
            begin_s = self.begin_s.setdefault(waiting, own_s)
            late = [rank for rank in missing if own_s[rank] - begin_s[rank] >= timeout_s]
            if timeout_s > 0 and late:
                self._time_out(late, timeout_s)
                return late
        return []

    def _time_out(self, late: Sequence[int], timeout_s: float) -> None:
        calls = {rank: name for rank, (name, _) in sorted(self.arrivals.items())}
        self.error = lambda rank: missing_error(calls.get(rank, "a collective call"), calls, late, timeout_s)


def missing_error(name: str, calls: Mapping[int, str], missing: Sequence[int], timeout_s: float) -> MoKTimeoutError:
    """For the call `name`, that ranks have not come to it. calls: those of the ranks that wait."""
    waits = [
        {"rank": rank, "stage": call, "edge": "entered", "index": peer, "have": 0, "want": 1, "peer": peer}
        for rank, call in calls.items()
        for peer in missing
    ]
    text = f"{name}: no call from rank {', '.join(map(str, missing))} within start_timeout_s={timeout_s:g} s"
    return MoKTimeoutError(text, waits)


def peer_error(rank: int, cause: Exception) -> Callable[[int], Exception]:
    """What the others raise where `rank` has raised `cause`."""
    try:
        text = f"rank {rank} raised {type(cause).__name__}: {cause}"
    except Exception:  # a user's exception may be unable to say anything
        text = f"rank {rank} raised {type(cause).__name__}"
    if isinstance(cause, MoKPeerError):  # it only saw the failure of another: name that one
        text = str(cause)
        rank = cause.rank if cause.rank is not None else rank
    return lambda _: MoKPeerError(text, rank=rank)


def raise_first(errors: Sequence[BaseException | None]) -> None:
    """Raises the error, by rank, that the others follow from."""
    raised = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not raised:
        return
    # Not what a peer saw of it, nor what was made of that.
    causes = [(rank, error) for rank, error in raised if not _is_consequence(error)]
    others = [(rank, error) for rank, error in raised if not isinstance(error, MoKPeerError)]
    rank, error = (causes or others or raised)[0]
    error.add_note(f"on rank {rank} of {len(errors)}")
    raise error


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
