"""Signals that never come: an error on every rank that names the culprit, NaN, and after reset the same bits again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FULL_RING, SMALL_RING, build, call, forward, make_workload, run, same_bits, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKDeadlockError, MoKPeerError, MoKTimeoutError
from mok_modular.protocol.roster import roster
from mok_modular.testing import Workload

FIELDS = {"rank", "stage", "task", "edge", "index", "have", "want", "peer"}

PULL = ["input_ready", "done", "x_ready", "hidden_ready", "slot_free", "shared_hidden_ready", "shared_ready"]
PULL += ["published", "exited", "topk_ready", "ids_pushed", "ids_counted", "laid_out"]
SPLIT = [*PULL, "gate_up_ready", "y_ready"]
PUSH = [edge for edge in SPLIT if edge not in ("slot_free", "input_ready", "x_ready")]
PUSH += ["entered", "pushed", "x_arrived", "y_arrived"]

SETUPS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fused": ({"mode": "fused", **SMALL_RING}, PULL),
    "split": ({"mode": "split", **SMALL_RING}, SPLIT),
    "mixed": ({"mode": "dispatch+gate_up|swiglu+down|combine", **SMALL_RING}, [*SPLIT]),
    "push and pull": ({"mode": "split", **FULL_RING, "dispatch": "push", "combine": "pull"}, PUSH),
    "fused push and pull": (
        {"mode": "fused", **FULL_RING, "dispatch": "push", "combine": "pull"},
        [edge for edge in PUSH if edge != "gate_up_ready"],
    ),
}

# What is counted on the way to another signal: the wait that is left over is for that one.
LEADS_TO = {
    "published": {"published", "input_ready", "done"},
    "exited": {"done"},
    "pushed": {"x_arrived"},
    "y_ready": {"y_ready", "y_arrived"},
    "ids_pushed": {"topk_ready"},
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 140], E=6, K=3)


def cases() -> list[Any]:
    return [pytest.param(setup, edge, id=f"{setup}: {edge}") for setup, (_, edges) in SETUPS.items() for edge in edges]


def test_every_edge_is_lost_once() -> None:
    """Tickets are no signals. The end of a schedule has a test of its own, and so have the edges of a backward."""
    names = roster().edge_names
    of_backward = set(names[names.index("d_y_ready") : names.index("published")])
    tested = {edge for _, edges in SETUPS.values() for edge in edges} | {"schedule_exited"}
    assert set(names) - tested - of_backward == {"tickets", "schedule_tickets"}


def fail_and_recover(
    workload: Workload, config: MoKConfig, signal: tuple[str, int, int, int], **group: Any
) -> tuple[list[Exception], list[Tensor], list[float]]:
    """Every rank's error of a call with a lost signal; asserts that the workspace then wants a reset, and works."""
    outputs: list[Tensor] = []
    seconds: list[float] = []

    def step(member: Any) -> Exception:
        workspace = workspace_for(workload, member, config)
        shared = workspace.shared
        expected = call(workload, workspace, config)
        if member.rank() == 0:
            shared.lost_signals = [signal]
            run_calls = shared.run

            def run_and_look(calls: Any) -> Any:
                outputs.extend(c.tensors["output"] for c in calls if "output" in c.tensors)
                return run_calls(calls)

            shared.run = run_and_look
        start = time.monotonic()
        with pytest.raises(MoKTimeoutError) as caught:
            call(workload, workspace, config)
        seconds.append(time.monotonic() - start)
        for attempt in (build, lambda *args: call(*args)):
            with pytest.raises(RuntimeError, match=r"an earlier call on this workspace failed.*reset\(\)"):
                attempt(workload, workspace, config)
        with pytest.raises(type(caught.value)):
            workspace.check()
        shared.lost_signals = []
        workspace.reset()
        workspace.check()
        for _ in range(3):  # both banks and both parities
            assert same_bits(call(workload, workspace, config), expected)
        return caught.value

    group.setdefault("num_workers", 4)
    return LocalGroup(workload.num_ranks, **group).run(step), outputs, seconds


def check_error(error: Exception, signal: tuple[str, int, int, int]) -> None:
    edge, at_rank, _, _ = signal
    edges = LEADS_TO.get(edge, {edge})
    assert isinstance(error, MoKTimeoutError)
    assert error.waits
    for wait in error.waits:
        assert wait.keys() >= FIELDS
        assert isinstance(wait["have"], int)
        assert wait["have"] != wait["want"]
    # The culprit: the first line names the edge that nobody will publish, who waits for it, and for whom.
    first = str(error).splitlines()[0]
    culprits = [
        wait
        for wait in error.waits
        if wait["edge"] in edges
        and (wait["peer"] if wait["peer"] >= 0 else wait["rank"]) == at_rank
        and f"nobody will publish {wait['edge']}[{wait['index']}]: rank {wait['rank']}, {wait['stage']} task "
        f"{wait['task']}, waits for rank {at_rank}, has {wait['have']} and wants {wait['want']}"
        in first
    ]
    assert culprits, str(error)


@pytest.mark.parametrize(("setup", "edge"), cases())
def test_a_lost_signal_is_a_deadlock(workload: Workload, setup: str, edge: str) -> None:
    options, _ = SETUPS[setup]
    signal = (edge, 1, -1, -1)
    errors, outputs, _ = fail_and_recover(workload, MoKConfig(**options), signal)
    for error in errors:
        assert type(error) is MoKDeadlockError
        check_error(error, signal)
    if edge in ("topk_ready", "ids_pushed", "ids_counted", "laid_out"):
        return
    # A rank that waited for something left NaN; one that was through has its output.
    assert isinstance(errors[0], MoKDeadlockError)
    waiting = {wait["rank"] for wait in errors[0].waits}
    for rank, output in enumerate(outputs[:2]):
        assert output.isnan().all() or (rank not in waiting and output.isfinite().all())


@pytest.mark.parametrize(
    "order", [{"order": "random", "seed": 5}, {"order": "last_first"}, {"num_workers": 1}], ids=str
)
@pytest.mark.parametrize("edge", SPLIT)
def test_in_any_order(workload: Workload, edge: str, order: dict[str, Any]) -> None:
    signal = (edge, 0, -1, -1)
    errors, _, _ = fail_and_recover(workload, MoKConfig(mode="split", **SMALL_RING), signal, **order)
    for error in errors:
        assert type(error) is MoKDeadlockError
        check_error(error, signal)


def test_a_single_lost_word_and_a_single_lost_index(workload: Workload) -> None:
    """One destination rank, one row block: the waits say which."""
    config = MoKConfig(mode="split", **SMALL_RING)
    (error, _), _, _ = fail_and_recover(workload, config, ("input_ready", 1, 0, -1))
    assert isinstance(error, MoKDeadlockError)
    assert {wait["rank"] for wait in error.waits if wait["edge"] == "input_ready"} == {0}
    check_error(error, ("input_ready", 1, 0, -1))
    (error, _), _, _ = fail_and_recover(workload, config, ("x_ready", 0, -1, 2))
    assert isinstance(error, MoKDeadlockError)
    assert {wait["index"] for wait in error.waits if wait["edge"] == "x_ready"} == {2}
    assert "nobody will publish x_ready[2]" in str(error)


@pytest.mark.parametrize("edge", ["input_ready", "done", "x_ready", "slot_free", "hidden_ready", "topk_ready"])
def test_a_lost_signal_is_a_timeout_on_threads(workload: Workload, edge: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0.3, start_timeout_s=0.3)
    signal = (edge, 1, -1, -1)
    errors, _, seconds = fail_and_recover(workload, config, signal, executor="threads")
    for error in errors:
        assert type(error) is MoKTimeoutError
        assert "timeout_s=0.3" in str(error)
        check_error(error, signal)
    assert max(seconds) < 5  # 0.3 s, and generous room for a busy machine


def test_threads_time_out_by_the_configured_limit(workload: Workload) -> None:
    """input_ready may take start_timeout_s, everything inside the call timeout_s."""
    config = MoKConfig(mode="fused", **SMALL_RING, timeout_s=60, start_timeout_s=0.2)
    errors, _, _ = fail_and_recover(workload, config, ("input_ready", 1, -1, -1), executor="threads")
    assert "start_timeout_s=0.2" in str(errors[0])


def test_a_rank_that_misses_the_end_of_a_schedule(workload: Workload) -> None:
    """Nobody waits for it, but the rank is one call behind, and the next call sees that."""
    config = MoKConfig(**SMALL_RING)
    expected = run(workload, config)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        workspace.shared.lost_signals = [("schedule_exited", 1, -1, -1)]
        schedule = build(workload, workspace, config)
        workspace.shared.lost_signals = []
        with pytest.raises(MoKPeerError, match="forward: ranks are not at the same call"):
            forward(workload, workspace, config, schedule)
        workspace.reset()
        return call(workload, workspace, config)

    assert same_bits(torch.cat(LocalGroup(2).run(step)), expected)


def test_orders_differ_and_seeds_repeat(workload: Workload) -> None:
    """What results do not depend on does change: who was where when nobody could go on."""

    def waits(**options: Any) -> list[tuple[Any, ...]]:
        config = MoKConfig(mode="fused", **SMALL_RING)
        (error, _), _, _ = fail_and_recover(workload, config, ("slot_free", 1, -1, -1), **options)
        assert isinstance(error, MoKDeadlockError)
        return [(wait["rank"], wait["worker"], wait["stage"], wait["task"]) for wait in error.waits]

    found = [waits(order="random", seed=seed) for seed in (1, 2, 3)]
    assert len({tuple(each) for each in found}) > 1
    assert waits(order="random", seed=2) == found[1]


def test_reset_is_allowed_at_any_time(workload: Workload) -> None:
    """Before the first call, between schedule and forward, twice in a row."""
    config = MoKConfig(**SMALL_RING)
    expected = run(workload, config)

    def step(member: Any) -> Tensor:
        workspace = workspace_for(workload, member, config)
        workspace.reset()
        workspace.reset()
        schedule = build(workload, workspace, config)
        workspace.reset()
        output, _ = forward(workload, workspace, config, schedule)
        workspace.reset()
        assert same_bits(call(workload, workspace, config), output)
        return output

    assert same_bits(torch.cat(LocalGroup(2).run(step)), expected)


def test_another_workspace_is_not_affected(workload: Workload) -> None:
    config = MoKConfig(**SMALL_RING)

    def step(member: Any) -> None:
        broken, other = (workspace_for(workload, member, config) for _ in range(2))
        expected = call(workload, other, config)
        broken.shared.lost_signals = [("done", 0, -1, -1)]
        with pytest.raises(MoKDeadlockError):
            call(workload, broken, config)
        assert same_bits(call(workload, other, config), expected)

    LocalGroup(2).run(step)


# ---- threads ----


def test_a_long_call_is_no_timeout() -> None:
    """Rank 1 waits for rank 0 all the time; as long as somebody works, nobody gives up."""
    long = make_workload([1500, 0], E=2, H=1024, I=512, S=0, routing=lambda rank, count, _: torch.zeros(count, 2).int())
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0.2)
    assert same_bits(run(long, config, executor="threads", num_workers=1), run(long, config))


TOO_FEW_THREADS = """
import resource, sys
import torch
from helpers import SMALL_RING, build, call, forward, make_workload, same_bits, workspace_for
from mok_modular import LocalGroup, MoKConfig

torch.set_num_threads(1)
workload = make_workload([60, 40])
config = MoKConfig(mode="split", **SMALL_RING)

def step(member):
    workspace = workspace_for(workload, member, config)
    expected = call(workload, workspace, config)
    schedule = build(workload, workspace, config)
    if member.rank() == 0:  # room for some of the threads' stacks
        num_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + 400 * 2**20, -1))
    try:
        forward(workload, workspace, config, schedule)
        error = "none"
    except RuntimeError as caught:
        error = str(caught)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    try:
        call(workload, workspace, config)
    except RuntimeError as caught:
        assert "reset" in str(caught)
    workspace.reset()
    return error, same_bits(call(workload, workspace, config), expected)

print(LocalGroup(2, executor="threads", num_workers=64).run(step))
"""


def test_too_few_threads_are_an_error(tmp_path: Path) -> None:
    """Not the end of the process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", TOO_FEW_THREADS],
        env=environment,
        cwd=tmp_path,  # away from the sources: the installed package is meant
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Resource temporarily unavailable") == 2
    assert done.stdout.count("True") == 2
