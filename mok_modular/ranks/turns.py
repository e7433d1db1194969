"""Members of LocalGroups take turns: one of them runs Python at a time, as if each had a process of its own.

A member passes its turn on where it waits for the others in a collective call, and where it ends. What torch keeps once
per process (ProcessState) is saved there, and installed when the member's next turn begins: so every member draws from
generators of its own. Turns go round by rank, which makes a run reproducible.

A member that waits for the others in another way (a threading.Barrier, a queue, a lock) cannot say so. Its turn is
taken away when it has used no CPU time for a moment, and it is stopped at its next call of a function, before it can
draw a number, until it gets a turn again. Members still have generators of their own then; only the order of their
turns depends on time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mok_modular.ranks.member_state import ProcessState

PATIENCE_S = 0.2
"""How long a member that uses no CPU time keeps its turn."""
BUSY_PATIENCE_S = 2.0
"""The same while other threads of the process compute: they may work for it (autograd's, those that it started)."""
MAX_TURN_S = 60.0
"""How long a member that computes keeps its turn: it may be polling for what another member does."""
IDLE_FRACTION = 0.05
"""A thread that uses a smaller part of a core waits."""
BUSY_FRACTION = 0.25
"""In a process that uses a larger part of a core, some thread computes."""


class Turn:
    """A member's place in the order of turns. Threads that the member starts share it."""

    def __init__(self) -> None:
        self.state: ProcessState | None = None  # while the member does not have its turn
        self.granted = threading.Condition(TURNS.lock)
        self.num_waiting = 1  # threads that can go on when the turn comes
        self.is_away = False  # the turn was taken from it
        self.is_closed = False  # the run is over or was interrupted: nobody waits any more
        self.is_acting = False  # it runs a call of all members, which nothing interrupts
        self.thread: threading.Thread | None = None
        self.python_thread = 0  # PyThreadState*
        self._own_s = 0.0
        self._own_since: float | None = None

    def own_s(self) -> float:
        """Seconds in which the member had its turn, or waited by means of its own."""
        since = self._own_since
        return self._own_s + (0.0 if since is None else time.monotonic() - since)

    def count_own_time(self, is_on: bool) -> None:
        """Starts or stops the clock of `own_s`."""
        if is_on != (self._own_since is not None):
            self._own_s = self.own_s()
            self._own_since = time.monotonic() if is_on else None


@dataclass
class _Window:
    """What the member that has the turn has used up, from a moment on."""

    turn: Turn
    number: int  # of the turn
    turn_begin: float
    begin: float
    process_s: float
    thread_s: float
    num_preempted: int


class Turns:
    """The turns of all members of all groups of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a thread may be stopped while it has it, and then waits without it
        self._turns: list[Turn] = []
        self._holder: Turn | None = None
        self._last: Turn | None = None  # who had the turn last
        self._num_grants = 0
        self._outside: ProcessState | None = None  # of threads that are no members, while there are members
        self._window: _Window | None = None
        self._borrowing = threading.RLock()

    # ---- a run ----

    def open(self, turns: Sequence[Turn], caller: Turn | None) -> None:
        """Begins a run: its members start from the state of the caller. A caller that is a member itself passes its
        turn on until `close`."""
        with self.lock:
            if caller is not None:
                self._drop(caller)
                caller.is_away = True
                caller.count_own_time(True)
            elif not self._turns:
                self._outside = ProcessState.save()
            for turn in turns:
                turn.state = self._outside if caller is None else caller.state
            self._turns += turns
            self._grant()

    def abandon(self, turns: Sequence[Turn]) -> None:
        """Members that wait for their turn go on without one."""
        with self.lock:
            for turn in turns:
                turn.is_closed = True
                turn.granted.notify_all()
                if turn in self._turns:
                    self._turns.remove(turn)
                if self._holder is turn:
                    self._holder = None
            self._grant()

    def close(self, turns: Sequence[Turn], caller: Turn | None, *, is_ok: bool) -> None:
        """Ends a run. The caller goes on with the generators of rank 0, or with its own where the run failed."""
        self.abandon(turns)
        with self.lock:
            state = self._outside if caller is None else caller.state
            final = turns[0].state
            if is_ok and state is not None and final is not None:
                state = replace(final, settings=state.settings)
            if caller is not None:
                caller.state = state
            else:
                self._outside = state
                if not self._turns and state is not None:
                    state.install()
        if caller is not None:
            self.take(caller)

    # ---- a member ----

    def enter(self, turn: Turn) -> None:
        """Makes this thread the member's, and waits for its first turn."""
        _current.turn = turn
        turn.python_thread = _get_python_thread()
        turn.thread = threading.current_thread()
        self.wait(turn)

    def end(self, turn: Turn) -> None:
        """The member has ended."""
        self.leave(turn)
        _current.turn = None

    def take(self, turn: Turn) -> None:
        """Waits until the member has the turn, if it does not have it."""
        if self._holder is turn or turn.is_closed:
            return
        self.announce(turn)
        self.wait(turn)

    def leave(self, turn: Turn) -> None:
        """Passes the turn on."""
        with self.lock:
            self._drop(turn)
            self._grant()

    def announce(self, turn: Turn) -> None:
        """One more of the member's threads can go on when its turn comes."""
        with self.lock:
            turn.num_waiting += 1
            if turn.is_away:
                turn.is_away = False
                turn.count_own_time(False)
            self._grant()

    def wait(self, turn: Turn, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Waits for the turn, for a thread that was announced once `is_ready()`."""
        with self.lock:
            while not (turn.is_closed or (self._holder is turn and is_ready())):
                turn.granted.wait()
            turn.num_waiting -= 1

    @contextmanager
    def lent(self, turn: Turn) -> Iterator[None]:
        """Inside, the state of the process is that of a member which waits, in a call that another one runs for all."""
        with self._borrowing:
            holder = self._holder
            if holder is None or holder is turn or turn.state is None:
                yield
                return
            state = ProcessState.save()
            turn.state.install()
            try:
                yield
            finally:
                turn.state = ProcessState.save()
                state.install()

    # ---- watching ----

    def watch(self) -> None:
        """Takes the turn from a member that does not go on, if another one can. To be called every few hundredths of a
        second while members run."""
        with self.lock:
            holder = self._holder
            if holder is None or holder.is_acting or not self._is_wanted():
                self._window = None
            elif self._is_stuck(holder):
                self._take_away(holder)

    def take_from(self, turn: Turn) -> None:
        """Takes the turn from a member that others have given up."""
        with self.lock:
            if self._holder is turn and turn.thread is not None and not turn.is_acting and self._is_wanted():
                self._take_away(turn)

    def _is_wanted(self) -> bool:
        return any(turn.num_waiting > 0 and turn is not self._holder for turn in self._turns)

    def _is_stuck(self, holder: Turn) -> bool:
        thread = holder.thread
        if thread is None:  # it is being started
            return False
        now, process_s, thread_s = time.monotonic(), time.process_time(), _thread_time(thread)
        state, num_preempted = _scheduling(thread)
        window = self._window
        if window is None or window.turn is not holder or window.number != self._num_grants:
            window = self._window = _Window(holder, self._num_grants, now, now, process_s, thread_s, num_preempted)
        if now - window.turn_begin > MAX_TURN_S:
            return True
        elapsed = now - window.begin
        # Where other processes have the cores, who computes may use next to nothing: it is preempted then, or runnable.
        wants_cpu = state in ("R", "D") or num_preempted > window.num_preempted
        if wants_cpu or thread_s - window.thread_s > IDLE_FRACTION * elapsed:
            self._window = replace(
                window, begin=now, process_s=process_s, thread_s=thread_s, num_preempted=num_preempted
            )
            return False
        is_process_busy = process_s - window.process_s > BUSY_FRACTION * elapsed
        return elapsed >= (BUSY_PATIENCE_S if is_process_busy else PATIENCE_S)

    # ---- with the lock held ----

    def _drop(self, turn: Turn) -> None:
        if self._holder is turn:
            turn.state = ProcessState.save()
            turn.count_own_time(False)
            self._holder = None

    def _grant(self) -> None:
        """Gives the turn to the next one that can go on, if nobody has it."""
        if self._holder is not None:
            return
        first = self._turns.index(self._last) + 1 if self._last in self._turns else 0
        for turn in (*self._turns[first:], *self._turns[:first]):
            if turn.num_waiting > 0:
                self._holder = self._last = turn
                self._num_grants += 1
                turn.is_away = False
                turn.count_own_time(True)
                turn.granted.notify_all()
                if turn.state is not None:
                    turn.state.install()
                return

    def _take_away(self, turn: Turn) -> None:
        turn.state = ProcessState.save()
        turn.is_away = True  # its own time goes on
        self._holder = None
        _stop_at_next_call(turn.python_thread)
        self._grant()


def _thread_time(thread: threading.Thread) -> float:
    """CPU seconds of a living thread; of the process where a system has no clock for other threads."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _scheduling(thread: threading.Thread) -> tuple[str, int]:
    """A thread's state (R: runnable, D: waits for a disk, S: sleeps) and how often it was preempted, as /proc tells."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    except OSError:
        return "", 0
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return lines.get("State", "?").split()[0], int(lines.get("nonvoluntary_ctxt_switches", 0))


# ---- stopping a thread ----

_ProfileFunction = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_get_python_thread: Any = ctypes.pythonapi.PyThreadState_Get
_get_python_thread.restype = ctypes.c_void_p
# What threading.setprofile_all_threads (Python 3.12) calls for every thread.
_set_profile: Any = getattr(ctypes.pythonapi, "_PyEval_SetProfile", None)
if _set_profile is not None:
    _set_profile.argtypes = (ctypes.c_void_p, _ProfileFunction, ctypes.c_void_p)
_current = threading.local()  # turn: of a member's thread


def current_turn() -> Turn | None:
    """The turn of the member whose thread this is; None for other threads."""
    return getattr(_current, "turn", None)


@_ProfileFunction
def _wait_for_turn(_arg: int, _frame: int, _event: int, _value: int) -> int:
    """A profile function: Python calls it before and after every function."""
    sys.setprofile(None)
    turn = current_turn()
    if turn is not None:
        TURNS.take(turn)
    return 0


def _stop_at_next_call(python_thread: int) -> None:
    """Lets a thread that has lost its turn wait for the next one where it calls or leaves a function. A Python profiler
    that runs in the thread, as cProfile, ends there."""
    if _set_profile is None:
        warnings.warn(
            "a member of a LocalGroup waits outside of a collective call, and this version of Python cannot stop it: "
            "until its next collective call it shares the random generators of the member that runs then",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    _set_profile(python_thread, _wait_for_turn, None)


TURNS = Turns()


def _forget_threads() -> None:
    """A forked process has none of the other members."""
    TURNS.__init__()  # type: ignore[misc]
    _current.turn = None


os.register_at_fork(after_in_child=_forget_threads)
