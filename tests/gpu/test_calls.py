"""Calls in sequence on a GPU: reuse of workspaces, streams, CUDA graphs, no look from the host, ranks that are late or
missing, a thousand calls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import helpers
import pytest
import torch
from helpers import FULL_RING, SMALL_RING, make_workload, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoE, MoKConfig, MoKTimeoutError, broadcast_copies, functional
from mok_modular.testing import Workload

DEVICE = "cuda:0"
CONFIG = MoKConfig(mode="dispatch|gate_up+swiglu|down|combine", **SMALL_RING)


class Single:
    """One rank with a workspace, and calls on it."""

    def __init__(self, workload: Workload, config: MoKConfig = CONFIG) -> None:
        self.workload, self.config = workload.to(DEVICE), config
        self.member = LocalGroup(1, device=DEVICE).members[0]
        self.workspace = helpers.workspace_for(self.workload, self.member, config)

    def call(self, config: MoKConfig | None = None, **options: Any) -> Tensor:
        return helpers.call(self.workload, self.workspace, config or self.config, **options)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_host_synchronisation_from_the_second_call_on() -> None:
    single = Single(make_workload([300]))
    first = single.call()
    for plan in ("split", "dispatch|gate_up+swiglu|down+combine"):
        config = MoKConfig(mode=plan, **SMALL_RING)
        single.call(config)
        with no_synchronisation():
            outputs = [single.call(config, save_context=is_kept) for is_kept in (True, False)]
        single.workspace.check()
        assert all(same_bits(first, output) for output in outputs)


def test_a_layer_compares_the_copies_of_its_shared_expert_in_its_first_call_only() -> None:
    """Ranks that seed differently are told; later calls do not wait for the device."""
    workload = make_workload([300, 200]).to(DEVICE)
    group, layers = LocalGroup(2, device=DEVICE), []
    for member in group.members:
        torch.manual_seed(1234 + member.rank())
        layers.append(MoE(64, 128, 8, 2, member, CONFIG, shared_intermediate_size=192, num_local_tokens=300))

    def call(member: Any) -> Tensor:
        rank = member.rank()
        with torch.no_grad():
            return layers[rank](workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])

    with pytest.raises(ValueError, match="w_shared_up on rank 1"):
        group.run(call)
    group.run(lambda member: broadcast_copies(layers[member.rank()]))
    outputs = group.run(call)
    with no_synchronisation():
        again = group.run(call)
    for rank, layer in enumerate(layers):
        assert same_bits(again[rank], outputs[rank])
        assert torch.equal(layer.w_shared_up, layers[0].w_shared_up)
        layer.workspace.check()


def test_capture_and_replay() -> None:
    single = Single(make_workload([300]))
    first = single.call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        single.call()  # warm, as capture wants it
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = single.call()
    x = single.workload.x[0]
    kept = x.clone()
    for step in range(6):
        output.fill_(float("nan"))
        if step == 3:  # other values, and calls in between
            x.copy_(kept.flip(0))
            other = single.call()
        graph.replay()
        assert same_bits(output, first if step < 3 else other)
    x.copy_(kept)
    assert same_bits(single.call(), first)
    single.workspace.check()


def test_a_workspace_is_created_before_capture() -> None:
    single = Single(make_workload([8]))
    single.call()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="create it before a CUDA graph is captured"), torch.cuda.graph(graph):
        helpers.workspace_for(single.workload, single.member, CONFIG)
    torch.cuda.synchronize()
    single = Single(make_workload([8]))
    graph = torch.cuda.CUDAGraph()
    grows = pytest.raises(RuntimeError, match="make one such call before a CUDA graph is captured")
    with grows, torch.cuda.graph(graph):
        single.call()  # its ring is not there yet
    single.call()
    single.workspace.check()


def test_two_streams_on_one_workspace() -> None:
    single = Single(make_workload([500], H=1024, I=512))
    first = single.call()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(single.call())
    single.workspace.check()
    assert all(same_bits(first, output) for output in outputs)


def test_members_on_streams_of_their_own() -> None:
    moved = make_workload([200, 100]).to(DEVICE)

    def step(member: Any) -> tuple[Tensor, Tensor]:
        workspace = helpers.workspace_for(moved, member, CONFIG)
        first = helpers.call(moved, workspace, CONFIG)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000 if member.rank() else 0)
            late = torch.zeros_like(moved.x[member.rank()]) + moved.x[member.rank()]  # ready only then
            schedule = helpers.build(moved, workspace, CONFIG)
            output, _ = functional.forward(
                CONFIG, workspace, schedule, late, moved.router_weights[member.rank()],
                *helpers.weights_of(moved, member),
            )  # fmt: skip
            copied = output.clone()
        stream.synchronize()
        workspace.check()
        return first, copied

    for first, output in LocalGroup(2, device=DEVICE).run(step):
        assert same_bits(first, output)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dispatch", ["pull", "pull_once", "push"])
def test_schedules_outlive_growth(dispatch: str, num_ranks: int) -> None:
    """Also on another stream than the one that made room, and with a schedule of the larger size in between."""
    config = MoKConfig(mode="split", dispatch=dispatch, **FULL_RING)
    moved = make_workload([60, 23, 0, 61][:num_ranks], K=3).to(DEVICE)

    def step(member: Any) -> list[Tensor]:
        workspace = helpers.workspace_for(moved, member, config)
        outputs = [helpers.call(moved, workspace, config)]
        schedule = helpers.build(moved, workspace, config)
        workspace.grow(400)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs.append(helpers.forward(moved, workspace, config, schedule)[0])
            outputs.append(helpers.call(moved, workspace, config))
            outputs.append(helpers.forward(moved, workspace, config, schedule)[0])
        stream.synchronize()
        workspace.check()
        return outputs

    for first, *others in LocalGroup(num_ranks, device=DEVICE).run(step):
        assert all(same_bits(first, output) for output in others)


def test_a_workspace_that_does_not_fit() -> None:
    """Bytes and arguments are told, and the workspace works as before."""
    single = Single(make_workload([200]))
    first = single.call()
    with pytest.raises(torch.OutOfMemoryError, match=r"num_local_tokens=1000000000, .* needs [\d,]+ bytes on 1 rank"):
        single.workspace.grow(1_000_000_000)
    assert same_bits(single.call(), first)
    single.workspace.grow(300)
    assert same_bits(single.call(), first)
    single.workspace.check()


def test_two_workspaces_and_two_schedules_at_once() -> None:
    one, two = Single(make_workload([200])), Single(make_workload([140], seed=1))
    first, second = one.call(), two.call()
    schedules = [helpers.build(one.workload, one.workspace, CONFIG) for _ in range(2)]
    again = two.call()
    for schedule in reversed(schedules):
        assert same_bits(helpers.forward(one.workload, one.workspace, CONFIG, schedule)[0], first)
    assert same_bits(again, second)


def test_a_smaller_number_of_tokens_and_back() -> None:
    workload = make_workload([200])
    single = Single(workload)
    first = single.call()
    small = helpers.make_workload([7]).to(DEVICE)
    few = helpers.call(small, single.workspace, CONFIG)
    assert same_bits(few, Single(helpers.make_workload([7])).call())
    assert same_bits(single.call(), first)


def test_a_thousand_calls_in_flat_memory() -> None:
    single = Single(make_workload([256]))
    first = single.call()
    single.call()
    torch.cuda.synchronize()
    before, differing = torch.cuda.memory_allocated(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    for i in range(1000):
        differing += (single.call().view(torch.int16) != first.view(torch.int16)).any()
        if i == 20:
            peak = torch.cuda.max_memory_allocated()
    single.workspace.check()
    assert int(differing) == 0
    assert torch.cuda.max_memory_allocated() == peak
    assert torch.cuda.memory_allocated() <= before + 1024


def test_addresses_that_come_back_in_another_order() -> None:
    """Tensors of a call lie where memory is free: a launch that was packed for another call must not write there."""
    single = Single(make_workload([256]))
    first = single.call()
    schedule = helpers.build(single.workload, single.workspace, CONFIG)
    sizes = sorted({tensor.numel() for tensor in schedule.tensors().values()})
    held: list[tuple[int, Tensor]] = []
    generator = random.Random(0)
    for i in range(300):
        while held and generator.random() < 0.6:
            value, tensor = held.pop(generator.randrange(len(held)))
            assert (tensor == value).all(), "a kernel wrote into somebody else's tensor"
        for size in generator.choices(sizes, k=3):
            held.append((i, torch.full((size,), i, dtype=torch.int32, device=DEVICE)))
        assert same_bits(single.call(), first), i
    assert all((tensor == value).all() for value, tensor in held)
    single.workspace.check()


def test_members_draw_from_cuda_generators_of_their_own() -> None:
    def step(member: Any) -> Tensor:
        torch.manual_seed(member.rank())
        time.sleep(0.01 * member.rank())
        first = torch.rand(5, device=DEVICE)
        member.all_reduce([])
        return torch.cat([first, torch.rand(5, device=DEVICE)]).cpu()

    for rank, drawn in enumerate(LocalGroup(4, device=DEVICE).run(step)):
        generator = torch.Generator(DEVICE).manual_seed(rank)
        assert torch.equal(
            drawn, torch.cat([torch.rand(5, device=DEVICE, generator=generator) for _ in range(2)]).cpu()
        )


def test_members_start_on_the_stream_of_the_caller() -> None:
    def step(member: Any) -> tuple[int, int]:
        if member.rank() == 1:
            torch.cuda.set_stream(torch.cuda.Stream())
        member.all_reduce([])
        return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = LocalGroup(3, device=DEVICE).run(step)
    assert found[0] == found[2] == (0, stream.cuda_stream)
    assert found[1] != found[0]


@pytest.mark.parametrize("late", [0, 3])
def test_a_late_rank_is_waited_for(late: int) -> None:
    workload = make_workload([60, 20, 0, 41])
    moved = workload.to(DEVICE)

    def step(member: Any) -> Tensor:
        config = MoKConfig(mode="split", timeout_s=0.05, **SMALL_RING)
        workspace = helpers.workspace_for(moved, member, config)
        outputs = []
        for delay_s in (0.0, 0.2):
            if member.rank() == late:
                time.sleep(delay_s)
            schedule = helpers.build(moved, workspace, config)
            if member.rank() == late:
                time.sleep(delay_s)
            outputs.append(helpers.forward(moved, workspace, config, schedule)[0])
        workspace.check()
        assert same_bits(*outputs)
        return outputs[0]

    helpers.assert_right(workload, torch.cat(LocalGroup(4, device=DEVICE).run(step)).cpu())


def test_a_rank_that_never_calls_is_named() -> None:
    workload = make_workload([30, 40]).to(DEVICE)
    config = MoKConfig(mode="split", start_timeout_s=0.3, **SMALL_RING)
    seen = []

    def step(member: Any) -> None:
        workspace = helpers.workspace_for(workload, member, config)
        helpers.call(workload, workspace, config)
        workspace.check()
        if member.rank() == 1:
            time.sleep(1)
            return
        try:
            helpers.call(workload, workspace, config)
        except MoKTimeoutError as error:
            seen.append(str(error))
            raise

    with pytest.raises(MoKTimeoutError, match="rank 1"):
        LocalGroup(2, device=DEVICE).run(step)
    assert seen and "build_schedule" in seen[0]
