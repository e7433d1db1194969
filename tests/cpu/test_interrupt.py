"""Ctrl-C: KeyboardInterrupt in bounded time, wherever the members are, and a group that works afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, build, call, forward, make_workload, run, same_bits, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, functional
from mok_modular.ranks import group as group_module
from mok_modular.testing import Workload

CONFIG = MoKConfig(**SMALL_RING)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([60, 9, 0, 40])


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[threading.Event], None]]:
    """Sends SIGINT shortly after an event."""
    monkeypatch.setattr(group_module, "INTERRUPT_PATIENCE_S", 1.0)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads: list[threading.Thread] = []

    def arm(event: threading.Event) -> None:
        def send() -> None:
            assert event.wait(20)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        threads.append(threading.Thread(target=send))
        threads[-1].start()

    yield arm
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGINT, old)


def any_member_is_running() -> bool:
    return any(thread.is_alive() for thread in threading.enumerate() if thread.name.startswith("mok-rank"))


def check_group_works(group: LocalGroup, workload: Workload) -> None:
    outputs = group.run(lambda member: call(workload, workspace_for(workload, member, CONFIG), CONFIG))
    assert same_bits(torch.cat(outputs), run(workload, CONFIG))


def test_ctrl_c_while_a_rank_sleeps(workload: Workload, ctrl_c: Callable[[threading.Event], None]) -> None:
    """The sleeper is left behind; what it calls later fails, and does not disturb the next run."""
    group = LocalGroup(4)
    waiting, go_on = threading.Event(), threading.Event()
    late: list[Exception] = []
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, CONFIG)
        try:
            if member.rank() == 3:
                waiting.set()
                assert go_on.wait(20)
            build(workload, workspace, CONFIG)
        except MoKPeerError as error:
            (late.append if member.rank() == 3 else lambda e: seen.update({member.rank(): e}))(error)
            raise

    ctrl_c(waiting)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.run(step)
    assert time.monotonic() - start < 10
    assert seen.keys() == {0, 1, 2}
    assert all("interrupted" in str(error) for error in seen.values())

    def next_step(member: Any) -> int:
        if member.rank() == 0:
            go_on.set()
            deadline = time.monotonic() + 20
            while not late and time.monotonic() < deadline:
                time.sleep(0.01)
        workspace_for(workload, member, CONFIG)
        return member.rank()

    assert group.run(next_step) == [0, 1, 2, 3]
    assert "interrupted" in str(late[0])
    check_group_works(group, workload)


@pytest.mark.parametrize("how", ["computes", "sleeps"])
def test_ctrl_c_while_others_wait_for_their_turn(
    workload: Workload, ctrl_c: Callable[[threading.Event], None], how: str
) -> None:
    """They do not begin any more. Who has the turn and computes is left behind."""
    group = LocalGroup(4)
    running, go_on = threading.Event(), threading.Event()
    begun: list[int] = []

    def step(member: Any) -> None:
        begun.append(member.rank())
        running.set()
        while not go_on.is_set():
            if how == "sleeps":
                time.sleep(0.05)

    ctrl_c(running)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.run(step)
    go_on.set()
    assert time.monotonic() - start < 10
    assert begun == [0] or how == "sleeps"  # the turn of one that sleeps may have been passed on
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    assert all(torch.equal(drawn, expected) for drawn in group.run(lambda _: torch.randn(3)))
    check_group_works(group, workload)


@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_ctrl_c_in_a_loop_of_calls(
    workload: Workload, ctrl_c: Callable[[threading.Event], None], executor: str
) -> None:
    group = LocalGroup(4, executor=executor)
    looping = threading.Event()
    workspaces: dict[int, functional.Workspace] = {}

    def step(member: Any) -> None:
        workspace = workspaces[member.rank()] = workspace_for(workload, member, CONFIG)
        while True:
            call(workload, workspace, CONFIG)
            looping.set()

    ctrl_c(looping)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.run(step)
    assert time.monotonic() - start < 10
    assert not any_member_is_running()

    def again(member: Any) -> Tensor:
        workspaces[member.rank()].reset()
        return call(workload, workspaces[member.rank()], CONFIG)

    assert same_bits(torch.cat(group.run(again)), run(workload, CONFIG))


def test_ctrl_c_in_one_long_fiber_run(ctrl_c: Callable[[threading.Event], None]) -> None:
    long = make_workload([3000], E=2, H=2048, I=2048, S=0)
    group = LocalGroup(1)
    running = threading.Event()
    errors: list[Exception] = []

    def step(member: Any) -> None:
        workspace = workspace_for(long, member, CONFIG)
        schedule = build(long, workspace, CONFIG)
        running.set()
        try:
            forward(long, workspace, CONFIG, schedule)
        except Exception as error:
            errors.append(error)
            raise

    ctrl_c(running)
    with pytest.raises(KeyboardInterrupt):
        group.run(step)
    assert len(errors) == 1
    assert "interrupted" in str(errors[0])


def test_ctrl_c_ends_waits_for_ever(workload: Workload, ctrl_c: Callable[[threading.Event], None]) -> None:
    """timeout_s=0 waits for ever; a lost signal on threads is then ended by Ctrl-C alone."""
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0, start_timeout_s=0)
    group = LocalGroup(4, executor="threads")
    running = threading.Event()

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        workspace.shared.lost_signals = [("x_ready", 1, -1, -1)]
        running.set()
        forward(workload, workspace, config, schedule)

    ctrl_c(running)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.run(step)
    assert time.monotonic() - start < 10
    assert not any_member_is_running()
    check_group_works(LocalGroup(4), workload)
