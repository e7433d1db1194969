"""LocalGroup: results and errors by rank, members that come late or never, and misuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, build, call, forward, make_layer, make_workload, run, same_bits, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKPeerError, MoKTimeoutError, functional
from mok_modular.testing import Workload

CONFIG = MoKConfig(**SMALL_RING)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([60, 9, 0, 40])


def test_results_by_rank() -> None:
    group = LocalGroup(3)
    assert group.run(lambda member: (member.rank(), member.size(), threading.current_thread().name)) == [
        (0, 3, "mok-rank-0"),
        (1, 3, "mok-rank-1"),
        (2, 3, "mok-rank-2"),
    ]
    assert group.run(lambda member: None) == [None, None, None]
    assert repr(group.members[2]) == "LocalMember(rank=2, size=3)"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"size": 0}, ValueError, ["size", "0", "1"]),
        ({"size": 129}, ValueError, ["size", "129", "128"]),
        ({"size": 2.0}, TypeError, ["size", "float"]),
        ({"size": True}, TypeError, ["size", "bool"]),
        ({"order": "fifo"}, ValueError, ["order", "fifo", "last_first"]),
        ({"seed": -1}, ValueError, ["seed", "-1"]),
        ({"seed": 0.5}, TypeError, ["seed", "float"]),
        ({"executor": "processes"}, ValueError, ["executor", "processes", "fibers"]),
        ({"num_workers": 0}, ValueError, ["num_workers", "0"]),
        ({"num_workers": "4"}, TypeError, ["num_workers", "str"]),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        LocalGroup(**{"size": 2, **options})
    for word in words:
        assert word in str(caught.value)


# ---- failing members ----


class NeedsTwoError(Exception):
    def __init__(self, code: int, *, what: str) -> None:
        super().__init__(code)
        self.what = what


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "builtin": lambda: KeyError("k"),
    "needs arguments": lambda: NeedsTwoError(3, what="x"),
    "mute": MuteError,
    "no Exception": lambda: SystemExit(4),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_the_causing_ranks_own_exception(workload: Workload, kind: str, after: int) -> None:
    """Raised before the schedule, between schedule and forward, or after a whole call; then the group works again."""
    error = ERRORS[kind]()
    seen: dict[int, Exception] = {}

    def fail_if(is_here: bool) -> None:
        if is_here:
            raise error

    def step(member: Any) -> None:
        rank = member.rank()
        workspace = workspace_for(workload, member, CONFIG)
        try:
            fail_if(rank == 2 and after == 0)
            schedule = build(workload, workspace, CONFIG)
            fail_if(rank == 2 and after == 1)
            forward(workload, workspace, CONFIG, schedule)
            fail_if(rank == 2 and after == 2)
            workspace.reset()
        except MoKPeerError as caught:
            seen[rank] = caught
            raise ValueError("what this rank made of it") from caught

    group = LocalGroup(4)
    with pytest.raises(type(error)) as caught:
        group.run(step)
    assert caught.value is error
    assert caught.value.__notes__[-1] == "on rank 2 of 4"
    assert seen.keys() == {0, 1, 3}
    for peer_error in seen.values():
        assert peer_error.rank == 2
        assert "rank 2 raised" in str(peer_error)
        assert type(error).__name__ in str(peer_error)
    outputs = group.run(lambda member: call(workload, workspace_for(workload, member, CONFIG), CONFIG))
    assert same_bits(torch.cat(outputs), run(workload, CONFIG))


def test_a_member_that_returns_early(workload: Workload) -> None:
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, CONFIG)
        for n in range(3):
            if member.rank() == 1 and n == 1:
                return
            try:
                call(workload, workspace, CONFIG)
            except MoKPeerError as error:
                seen[member.rank()] = error
                raise

    group = LocalGroup(4)
    with pytest.raises(MoKPeerError, match="rank 1 returned after 3 collective calls"):
        group.run(step)
    assert seen.keys() == {0, 2, 3}
    assert all(error.rank == 1 and "in build_schedule" in str(error) for error in seen.values())
    assert group.run(lambda member: member.rank()) == [0, 1, 2, 3]


def test_a_member_that_never_calls_is_named() -> None:
    """By start_timeout_s of the call, which may differ from that of the workspace; after reset the next call works."""
    workload = make_workload([20, 5])
    hasty = MoKConfig(**SMALL_RING, start_timeout_s=0.2)
    expected = run(workload, CONFIG)
    release = threading.Event()

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, CONFIG)
        if member.rank() == 1:
            assert release.wait(20)
        try:
            build(workload, workspace, hasty)
            pytest.fail("the call went through")
        except MoKTimeoutError as error:
            if member.rank() == 0:
                assert "build_schedule: no call from rank 1 within start_timeout_s=0.2" in str(error)
                (wait,) = error.waits
                assert (wait["rank"], wait["stage"], wait["edge"], wait["peer"]) == (0, "build_schedule", "entered", 1)
        release.set()
        workspace.reset()
        return call(workload, workspace, hasty)

    assert same_bits(torch.cat(LocalGroup(2).run(step)), expected)


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_late_rank_changes_nothing(workload: Workload, late: int) -> None:
    """It sleeps before every collective call."""
    expected = run(workload, CONFIG)

    def step(member: Any) -> list[Tensor]:
        def wait() -> None:
            if member.rank() == late:
                time.sleep(0.1)

        outputs = []
        wait()
        workspace = workspace_for(workload, member, CONFIG)
        for _ in range(2):
            wait()
            schedule = build(workload, workspace, CONFIG)
            wait()
            outputs.append(forward(workload, workspace, CONFIG, schedule)[0])
        wait()
        workspace.reset()
        return [*outputs, call(workload, workspace, CONFIG)]

    by_rank = LocalGroup(4).run(step)
    for n in range(3):
        assert same_bits(torch.cat([outputs[n] for outputs in by_rank]), expected)


# ---- misuse ----


def test_run_is_neither_nested_nor_shared() -> None:
    group = LocalGroup(2)
    entered, leave = threading.Event(), threading.Event()

    def nested(member: Any) -> None:
        member.group.run(lambda _: None)

    with pytest.raises(RuntimeError, match="running already"):
        group.run(nested)

    def slow(member: Any) -> int:
        entered.set()
        assert leave.wait(20)
        return member.rank()

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(group.run(slow)))
    thread.start()
    assert entered.wait(20)
    with pytest.raises(RuntimeError, match="running already"):
        group.run(lambda member: None)
    leave.set()
    thread.join()
    assert results == [[0, 1]]
    # Another group is another matter.
    assert group.run(lambda member: LocalGroup(2).run(lambda m: m.rank())) == [[0, 1], [0, 1]]


def test_members_outside_of_run_fail_at_once(workload: Workload) -> None:
    group = LocalGroup(4)
    layers = group.run(lambda member: make_layer(workload, member))
    with (
        pytest.raises(RuntimeError, match=r"members of a group of 4 ranks work inside LocalGroup\.run only"),
        torch.no_grad(),
    ):
        layers[0](workload.x[0], workload.expert_ids[0], workload.router_weights[0])
    with pytest.raises(RuntimeError, match="create_workspace"):
        workspace_for(workload, group.members[1], CONFIG)
    # A group of one rank needs no run.
    alone = make_workload([7])
    workspace = workspace_for(alone, LocalGroup(1).members[0], CONFIG)
    assert same_bits(call(alone, workspace, CONFIG), run(alone, CONFIG))


def test_a_thread_of_a_member_may_call(workload: Workload) -> None:
    def step(member: Any) -> Tensor:
        outputs: list[Tensor] = []
        workspace = workspace_for(workload, member, CONFIG)
        thread = threading.Thread(target=lambda: outputs.append(call(workload, workspace, CONFIG)))
        thread.start()
        thread.join()
        return outputs[0]

    assert same_bits(torch.cat(LocalGroup(4).run(step)), run(workload, CONFIG))


def test_a_peers_workspace_is_refused() -> None:
    workload = make_workload([20, 5])
    workspaces: dict[int, functional.Workspace] = {}

    def step(member: Any) -> None:
        workspaces[member.rank()] = workspace_for(workload, member, CONFIG)
        workspaces[member.rank()].reset()
        build(workload, workspaces[0], CONFIG)

    with pytest.raises(RuntimeError, match=r"build_schedule: rank 1 uses the member \(or a workspace\) of rank 0"):
        LocalGroup(2).run(step)


def test_two_groups_at_once(workload: Workload) -> None:
    """Each in a thread of its own, with all its ranks."""
    expected = run(workload, CONFIG)
    outputs: list[list[Tensor]] = [[], []]

    def loop(i: int, **options: Any) -> None:
        for _ in range(10):
            outputs[i].append(run(workload, CONFIG, **options))

    threads = [
        threading.Thread(target=loop, args=(i,), kwargs=options)
        for i, options in enumerate([{"order": "random"}, {"executor": "threads"}])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in outputs] == [10, 10]
    assert all(same_bits(output, expected) for each in outputs for output in each)


def test_many_groups_and_ranks() -> None:
    workload = make_workload([1, 2, 3, 0] * 8, E=64)
    expected = run(workload, CONFIG)
    for _ in range(3):
        assert same_bits(run(workload, CONFIG), expected)


# ---- all_reduce ----


def test_all_reduce_adds_in_the_order_of_the_ranks() -> None:
    values = torch.tensor([2.0**27, 1.0, -(2.0**27), 1.0])

    def step(member: Any) -> tuple[Tensor, Tensor]:
        parts = values[member.rank()].clone(), torch.full((2, 3), member.rank(), dtype=torch.bfloat16)
        parts[0].requires_grad_()
        member.all_reduce(parts)
        member.all_reduce([])
        return parts

    for total, ranks in LocalGroup(4).run(step):
        assert total.item() == 1.0  # the first 1 is lost beside 2^27, the last is not
        assert torch.equal(ranks, torch.full((2, 3), 6, dtype=torch.bfloat16))


def test_all_reduce_names_what_differs() -> None:
    for other in (torch.zeros(3), torch.zeros(2).double()):
        with pytest.raises(ValueError, match="all_reduce: shapes and dtypes must be the same"):
            LocalGroup(2).run(
                lambda member, other=other: member.all_reduce([other if member.rank() else torch.zeros(2)])
            )
