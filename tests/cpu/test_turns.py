"""Members of a LocalGroup behave like processes: they draw from generators of their own, start from the caller's state,
and take turns without hanging."""

from __future__ import annotations

import contextvars
import importlib
import os
import queue
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SMALL_RING, call, make_workload, workspace_for
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mok_modular import LocalGroup, MoE, MoKConfig, MoKPeerError, MoKTimeoutError
from mok_modular.ranks import member_state, turns

R = 4


def draws_of(seed: int, count: int = 3) -> list[float]:
    """What a process draws under a seed; the caller's generator stays as it is."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()


def draw(count: int = 3) -> list[float]:
    return torch.randn(count).tolist()


def meet(member: Any) -> None:
    member.all_reduce([])


def meet_twice(member: Any) -> None:
    """The last one of the first call passes its turn on in the second."""
    meet(member)
    meet(member)


def busy(seconds: float) -> None:
    """Uses so much CPU time of its thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which turns are taken away."""
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    monkeypatch.setattr(turns, "BUSY_PATIENCE_S", 0.1)


# ---- generators of their own ----


@pytest.mark.parametrize("delay_s", [0.01, 0.3])
def test_seeds_of_members(delay_s: float) -> None:
    """A sleep longer than PATIENCE_S lets others run, and changes no number."""

    def step(member: Any) -> list[float]:
        torch.manual_seed(member.rank())
        time.sleep(delay_s * member.rank())
        return draw()

    assert LocalGroup(R).run(step) == [draws_of(rank) for rank in range(R)]


def test_a_checkpoint_repeats_noisy_routing() -> None:
    def step(member: Any) -> tuple[bool, bool]:
        torch.manual_seed(0)
        layer = MoE(128, 192, 8, 2, member)
        x = torch.randn(200, 128, generator=torch.Generator().manual_seed(member.rank())).bfloat16().requires_grad_()
        used = []

        def block(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01 * member.rank())
            weights, ids = torch.rand(len(x), 8).softmax(-1).topk(2)
            used.append((ids, weights))
            return layer(x, ids, weights)

        checkpoint(block, x, use_reentrant=False).float().square().sum().backward()
        plain = x.detach().clone().requires_grad_()
        layer(plain, *used[0]).float().square().sum().backward()
        return torch.equal(used[0][0], used[1][0]), torch.equal(x.grad, plain.grad)

    assert LocalGroup(R).run(step) == [(True, True)] * R


def test_training_inside_run_is_reproducible() -> None:
    """Two blocks built by every member from one seed: equal replicas, and the same losses in every run."""

    def step(member: Any) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(2)
        )
        layer = MoE(64, 64, 8, 2, member)
        optimizer = torch.optim.SGD([*model.parameters(), *layer.parameters()], lr=0.01)
        torch.manual_seed(1 + member.rank())
        losses = []
        for _ in range(3):
            x = torch.randn(2, 8, 64)
            for block in model:
                x = block(x)
            tokens = x.flatten(0, 1)
            weights, ids = (tokens @ torch.randn(64, 8)).softmax(-1).topk(2)
            loss = (x + layer(tokens.bfloat16(), ids, weights).float().view_as(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            member.all_reduce([p.grad for p in model.parameters()])
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()]

    runs = [LocalGroup(2).run(step) for _ in range(3)]
    for run in runs:
        assert [losses for losses, _ in run] == [losses for losses, _ in runs[0]]
        assert run[0][0] != run[1][0]  # every rank has inputs of its own
        assert all(torch.equal(a, b) for a, b in zip(run[0][1], run[1][1], strict=True))


def test_python_and_numpy_generators() -> None:
    def expected(rank: int) -> list[float]:
        own, numpy = random.Random(rank), np.random.RandomState(rank)
        return [own.random(), own.random(), *(numpy.normal() for _ in range(3)), numpy.rand()]

    def step(member: Any) -> list[float]:
        random.seed(member.rank())
        np.random.seed(member.rank())
        found = [random.random()]
        meet(member)
        found.append(random.random())
        for n in range(3):  # NumPy makes normal numbers two at a time and keeps the second
            found.append(np.random.normal())
            if n == 0 and member.rank() == R - 2:  # the others wait: its state is saved, and no other is installed
                LocalGroup(1).run(lambda _: None)
            else:
                meet_twice(member)
        if member.rank() == R - 2:
            meet_twice(member)
        return [*found, np.random.rand()]

    assert LocalGroup(R).run(step) == [expected(rank) for rank in range(R)]


def test_a_member_with_another_numpy_generator() -> None:
    before = np.random.get_bit_generator()

    def step(member: Any) -> tuple[str, float]:
        if member.rank() == 1:
            np.random.set_bit_generator(np.random.PCG64(3))
        else:
            np.random.seed(member.rank())
        meet_twice(member)
        return type(np.random.get_bit_generator()).__name__, np.random.rand()

    found = LocalGroup(3).run(step)
    numbers = [np.random.RandomState(0), np.random.RandomState(np.random.PCG64(3)), np.random.RandomState(2)]
    assert found == [(name, own.rand()) for name, own in zip(["MT19937", "PCG64", "MT19937"], numbers, strict=True)]
    assert np.random.get_bit_generator() is before


def test_settings_of_the_process() -> None:
    """Each member has its own around a collective call, and the caller's stay as they are."""

    def settings() -> tuple[Any, ...]:
        flash = torch.backends.cuda.flash_sdp_enabled()
        return torch.get_default_dtype(), torch.is_anomaly_enabled(), flash

    def step(member: Any) -> tuple[Any, ...]:
        if member.rank() == 1:
            torch.set_default_dtype(torch.float64)
        meet(member)
        if member.rank() == 2:
            with torch.autograd.set_detect_anomaly(True), sdpa_kernel(SDPBackend.MATH):
                meet(member)
                found = settings()
                meet(member)
                return found
        meet(member)
        found = settings()
        meet(member)
        return found

    before = settings()
    found = LocalGroup(R).run(step)
    usual = (torch.float32, False, True)
    assert found == [usual, (torch.float64, False, True), (torch.float32, True, False), usual]
    assert settings() == before


def test_members_start_where_the_caller_is_and_rank_0_hands_its_generators_back() -> None:
    torch.manual_seed(5)
    group = LocalGroup(R)

    def step(member: Any) -> list[float]:
        found = draw()
        if member.rank():
            draw(7)
        return found

    assert group.run(step) == [draws_of(5, 3)] * R
    assert draw() == draw_after(5, 3)
    with pytest.raises(ValueError, match="mine"):
        torch.manual_seed(6)
        group.run(lambda member: [draw(), raise_(ValueError("mine"))])
    assert draw() == draws_of(6)


def draw_after(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    torch.randn(count, generator=generator)
    return torch.randn(3, generator=generator).tolist()


def raise_(error: Exception) -> None:
    raise error


def test_a_swapped_stage_draws_from_its_ranks_generator() -> None:
    """One member runs the call of all ranks."""
    workload = make_workload([40, 30, 20, 10])
    drawn: dict[int, list[float]] = {}

    def reduce(combined: Any, router_weights: Any, mask: Any, shared: Any) -> torch.Tensor:
        drawn.setdefault(len(router_weights), []).append(torch.randn(1).item())
        return torch.zeros(len(router_weights), combined.shape[-1], dtype=torch.bfloat16)

    for executor in ("fibers", "threads"):
        drawn.clear()
        config = MoKConfig(mode="split", stages={"reduce": reduce}, **SMALL_RING)

        def step(member: Any, config: MoKConfig = config) -> float:
            workspace = workspace_for(workload, member, config)
            torch.manual_seed(member.rank())
            call(workload, workspace, config, save_context=False)
            return torch.randn(1).item()

        after = LocalGroup(R, executor=executor).run(step)
        for rank, num_tokens in enumerate([40, 30, 20, 10]):
            generator = torch.Generator().manual_seed(rank)
            expected = [torch.randn(1, generator=generator).item() for _ in range(2)]
            assert [*drawn[num_tokens], after[rank]] == expected


def test_no_run_differs_from_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bars.py cover` counts in 200 runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    assert importlib.import_module("cover_ranks").num_unlike_processes(2) == 0


# ---- what is the caller's ----


def test_autocast_grad_and_inference_mode_are_the_callers() -> None:
    linear = torch.nn.Linear(8, 8)

    def step(member: Any) -> tuple[Any, ...]:
        out = linear(torch.ones(2, 8))
        meet(member)
        return out.dtype, out.requires_grad, out.is_inference(), torch.is_autocast_cache_enabled()

    group = LocalGroup(2)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert group.run(step) == [(torch.bfloat16, True, False, False)] * 2
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        assert group.run(step) == [(torch.float16, False, False, True)] * 2
    with torch.inference_mode():
        assert group.run(step) == [(torch.float32, False, True, True)] * 2
    assert group.run(step) == [(torch.float32, True, False, True)] * 2


def test_a_members_own_modes_stay_its_own() -> None:
    def step(member: Any) -> tuple[bool, bool]:
        with torch.autocast("cpu", enabled=member.rank() == 0), torch.set_grad_enabled(member.rank() == 1):
            meet(member)
            return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

    assert LocalGroup(2).run(step) == [(True, False), (False, True)]


def test_default_device_context_variables_and_counters_are_the_callers() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def step(member: Any) -> tuple[str, int]:
        torch.ones(4, 8) @ torch.ones(8, 2)
        meet(member)
        seen = variable.get()
        variable.set(member.rank())
        return torch.empty(1).device.type, seen

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        assert LocalGroup(2).run(step) == [("meta", 7)] * 2
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 2
    assert variable.get() == 7
    assert torch.empty(1).device.type == "cpu"


def profiled_step(member: Any) -> torch.Tensor:
    layer = MoE(64, 64, 4, 2, member)
    return layer(torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1]] * 5), torch.rand(5, 2))


@pytest.mark.parametrize("is_all_threads", [False, True])
def test_a_profiler_around_run_sees_the_members(is_all_threads: bool) -> None:
    options = {"experimental_config": _ExperimentalConfig(profile_all_threads=True)} if is_all_threads else {}
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], **options) as found:
            LocalGroup(2).run(profiled_step)
        assert {event.key: event.count for event in found.key_averages()}["mok_modular::forward"] == 2
    LocalGroup(2).run(profiled_step)


def test_a_profiler_that_cannot_see_the_members_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_state, "_PROFILER", "_ZN5torch7missing")
    with (
        profile(activities=[ProfilerActivity.CPU]) as found,
        pytest.warns(RuntimeWarning, match="not in this profile.*profile_all_threads=True"),
    ):
        LocalGroup(2).run(profiled_step)
    assert "mok_modular::forward" not in {event.key for event in found.key_averages()}


# ---- turns ----


def test_turns_go_round_by_rank_and_only_at_collective_calls() -> None:
    def step(member: Any) -> None:
        for n in range(3):
            for _ in range(3):
                order.append((n, member.rank()))
                busy(0.02)
            meet(member)

    for _ in range(3):
        order: list[tuple[int, int]] = []
        LocalGroup(3).run(step)
        # The last one of a round goes on with its turn.
        expected = [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (2, 1), (2, 2), (2, 0)]
        assert order == [each for each in expected for _ in range(3)]


def test_a_member_that_computes_keeps_its_turn(impatient: None) -> None:
    """Also beside other processes that want the cores."""
    order: list[int] = []

    def step(member: Any) -> None:
        busy(0.3)
        a = torch.ones(300, 300)
        for _ in range(100):
            a = (a @ a).clamp(0, 1)
        order.append(member.rank())

    LocalGroup(3).run(step)
    assert order == [0, 1, 2]


WAITS: dict[str, Callable[[], Callable[[int], None]]] = {}


def waits(fn: Callable[[], Callable[[int], None]]) -> Callable[[], Callable[[int], None]]:
    WAITS[fn.__name__] = fn
    return fn


@waits
def barrier() -> Callable[[int], None]:
    found = threading.Barrier(R)
    return lambda rank: found.wait(20) and None


@waits
def a_queue() -> Callable[[int], None]:
    """Rank 0 waits for what the others put."""
    found: queue.Queue[int] = queue.Queue()
    return lambda rank: found.put(rank) if rank else [found.get(timeout=20) for _ in range(R - 1)] and None


@waits
def a_pair_of_queues() -> Callable[[int], None]:
    """From rank to rank and back to the first."""
    found = [queue.Queue() for _ in range(R)]

    def wait(rank: int) -> None:
        if rank == 0:
            found[1].put(None)
        found[rank].get(timeout=20)
        if rank:
            found[(rank + 1) % R].put(None)

    return wait


@waits
def polling() -> Callable[[int], None]:
    seen: set[int] = set()

    def wait(rank: int) -> None:
        seen.add(rank)
        while len(seen) < R:
            time.sleep(0.005)

    return wait


@waits
def an_event_of_the_last_rank() -> Callable[[int], None]:
    found = threading.Event()
    return lambda rank: found.set() if rank == R - 1 else found.wait(20) and None


@pytest.mark.parametrize("kind", WAITS)
def test_members_that_wait_by_means_of_their_own(kind: str, impatient: None) -> None:
    """They do not hang, and what they draw afterwards is still what they would draw as processes."""
    for _ in range(3):
        wait = WAITS[kind]()

        def step(member: Any, wait: Callable[[int], None] = wait) -> list[float]:
            torch.manual_seed(member.rank())
            found = draw(1)
            wait(member.rank())
            found += draw(1)
            meet(member)
            return found + draw(1)

        expected = []
        for rank in range(R):
            generator = torch.Generator().manual_seed(rank)
            expected.append([torch.randn(1, generator=generator).item() for _ in range(3)])
        assert LocalGroup(R).run(step) == expected


def test_a_lock_of_the_members(impatient: None) -> None:
    """Held while a member sleeps; nobody waits collectively with it."""
    lock = threading.Lock()

    def step(member: Any) -> list[float]:
        with lock:
            torch.manual_seed(member.rank())
            time.sleep(0.1)
            found = draw()
        meet(member)
        return found

    assert LocalGroup(R).run(step) == [draws_of(rank) for rank in range(R)]


def test_a_member_that_polls_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_TURN_S", 0.2)
    is_set: list[bool] = []

    def step(member: Any) -> None:
        if member.rank() == 0:
            while not is_set:
                pass
        is_set.append(True)

    LocalGroup(2).run(step)


def test_a_python_that_cannot_stop_threads_warns(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    monkeypatch.setattr(turns, "_set_profile", None)
    found = threading.Barrier(2)
    with pytest.warns(RuntimeWarning, match="shares the random generators"):
        assert LocalGroup(2).run(lambda member: found.wait(20) >= 0) == [True, True]


def test_threads_of_a_member_share_its_turn() -> None:
    """They make collective calls and end without waiting for PATIENCE_S."""

    def step(member: Any) -> list[float]:
        torch.manual_seed(member.rank())
        for _ in range(5):
            thread = threading.Thread(target=meet, args=(member,))
            thread.start()
            thread.join()
        return draw()

    start = time.monotonic()
    assert LocalGroup(R).run(step) == [draws_of(rank) for rank in range(R)]
    assert time.monotonic() - start < 5


def test_a_failure_before_others_have_had_a_turn() -> None:
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        if member.rank() == 1:
            raise ValueError("too early")
        try:
            meet(member)
        except MoKPeerError as error:
            seen[member.rank()] = error
            raise

    group = LocalGroup(R)
    with pytest.raises(ValueError, match="too early"):
        group.run(step)
    assert seen.keys() == {0, 2, 3}
    assert all("rank 1 raised ValueError" in str(error) for error in seen.values())
    assert group.run(lambda member: member.rank()) == [0, 1, 2, 3]


# ---- time limits ----


def test_who_waits_for_a_turn_is_not_late() -> None:
    """Together the members compute for much longer than start_timeout_s, each for less."""

    def step(member: Any) -> None:
        busy(0.03)
        member.all_reduce([], start_timeout_s=0.8)

    LocalGroup(32).run(step)


def test_who_computes_for_too_long_is_named_alone() -> None:
    seen: dict[int, Exception] = {}

    def step(member: Any) -> None:
        if member.rank() == 1:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                sum(range(100))
        try:
            member.all_reduce([], start_timeout_s=0.3)
        except MoKTimeoutError as error:
            seen.setdefault(member.rank(), error)
            raise

    start = time.monotonic()
    with pytest.raises(MoKTimeoutError, match=r"no call from rank 1 within start_timeout_s=0\.3 s"):
        LocalGroup(3).run(step)
    assert time.monotonic() - start < 20
    assert 0 in seen


# ---- several groups ----


def test_a_member_runs_another_group() -> None:
    """The inner members start from the member that runs them, which goes on from the inner rank 0."""

    def inner(member: Any) -> list[float]:
        meet(member)
        found = draw()
        meet(member)
        return found

    def step(member: Any) -> list[Any]:
        torch.manual_seed(member.rank())
        return [LocalGroup(2).run(inner), draw()]

    expected = [[[draws_of(rank)] * 2, draw_after(rank, 3)] for rank in range(3)]
    assert LocalGroup(3).run(step) == expected


def test_groups_in_several_threads() -> None:
    """Their members take turns among them all."""
    found: dict[int, list[list[float]]] = {}

    def step(member: Any, base: int) -> list[float]:
        torch.manual_seed(base + member.rank())
        drawn = []
        for _ in range(20):
            drawn += draw(1)
            meet(member)
        return drawn

    def run(base: int) -> None:
        found[base] = LocalGroup(R).run(lambda member: step(member, base))

    threads = [threading.Thread(target=run, args=(base,)) for base in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for base, by_rank in found.items():
        for rank, drawn in enumerate(by_rank):
            generator = torch.Generator().manual_seed(base + rank)
            assert drawn == [torch.randn(1, generator=generator).item() for _ in range(20)]


@pytest.fixture
def no_fork_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def test_a_forked_process_has_turns_of_its_own(no_fork_warning: None) -> None:
    def step(member: Any) -> int:
        meet(member)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.manual_seed(3)
                code = 0 if LocalGroup(2).run(lambda _: draw()) == [draws_of(3)] * 2 else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert LocalGroup(2).run(step) == [0, 0]
