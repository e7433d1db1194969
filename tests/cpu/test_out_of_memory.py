"""Memory that cannot be had: bytes and the arguments that ask for them, on every rank; the next layer works."""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    SMALL_RING,
    assert_same,
    backward,
    build,
    call_both,
    forward,
    make_workload,
    run_layer,
    workspace_for,
)

from mok_modular import LocalGroup, MoE, MoKConfig, MoKPeerError, functional
from mok_modular.protocol.sizes import Sizes, extension
from mok_modular.targets.cuda.memory import CudaMemory

TOO_MANY = 2**31 - 1
"""Tokens of one route each: with a hidden size of 2^15 they fill 128 TiB, the whole address space."""


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No more address space than this beside what is used already."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    gc.collect()  # what is given back later would be room
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_layer_says_what_asks_for_too_much() -> None:
    workload = make_workload([3])
    expected = run_layer(workload)
    layer = MoE(2**15, 64, 1, 1, LocalGroup(1), num_local_tokens=TOO_MANY)
    with torch.no_grad(), pytest.raises(MemoryError) as caught:
        layer(torch.zeros(1, 2**15).bfloat16(), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    text = str(caught.value)
    assert f"num_local_tokens={TOO_MANY}, hidden_size=32768, topk=1 needs " in text
    needed = re.search(r"needs ([\d,]+) bytes on 1 rank;", text)
    assert needed is not None
    assert int(needed[1].replace(",", "")) > 2**48  # x and the cells of combine
    assert f"mok-modular doctor --shape 32768,I,E,1,S --ranks 1 --tokens {TOO_MANY} prints" in text
    assert torch.equal(run_layer(workload), expected)


def test_sizes_beyond_32_bits_are_named() -> None:
    with pytest.raises(ValueError, match="hidden_size must be a multiple of 64 below 2147483648, got 2147483648"):
        functional.create_workspace(MoKConfig(), LocalGroup(1), num_local_tokens=1, hidden_size=2**31, topk=1)


def test_every_rank_is_told() -> None:
    def step(member: Any) -> str:
        with pytest.raises(MemoryError) as caught:
            functional.create_workspace(MoKConfig(), member, num_local_tokens=TOO_MANY // 2, hidden_size=2**16, topk=1)
        functional.create_workspace(MoKConfig(), member, num_local_tokens=5, hidden_size=64, topk=1).grow(6)
        return str(caught.value)

    first, second = LocalGroup(2).run(step)
    assert first == second
    assert "bytes on each of 2 ranks" in first


def test_a_call_says_what_asks_for_too_much() -> None:
    """The ring is made in a call. What does not fit leaves the workspace as it was."""
    workload = make_workload([3, 5], I=2048, K=1)
    config = MoKConfig(macrobatch_size=2**17)

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config, num_local_tokens=2**17)  # a ring of 1.5 GiB on each rank
        schedule = build(workload, workspace, config)
        size = workspace.num_bytes()
        if member.rank() == 0:
            rooms.append(room_for(2**29))
            rooms[0].__enter__()
        with pytest.raises(MemoryError) as caught:
            forward(workload, workspace, config, schedule, save_context=False)
        assert "which 1,644,167,168 hold the ring of macrobatch_size=131072 rows (131072 here)" in str(caught.value)
        assert "--shape 64,2048,8,1,192 --ranks 2 --tokens 131072" in str(caught.value)
        assert workspace.num_bytes() == size
        if member.rank() == 0:
            rooms.pop().__exit__(None, None, None)
        member.all_reduce([])
        call_both(workload, workspace, config)

    rooms: list[Any] = []
    LocalGroup(2).run(step)


def test_a_backward_without_room_leaves_forwards_alone() -> None:
    workload = make_workload([5], I=2048, K=1)
    config = MoKConfig(macrobatch_size=2**17)

    def step(member: Any) -> None:
        workspace = workspace_for(workload, member, config, num_local_tokens=2**17)
        schedule = build(workload, workspace, config)
        output, context = forward(workload, workspace, config, schedule)
        with room_for(2**29):
            with pytest.raises(MemoryError, match="hold the ring"):
                backward(workload, workspace, config, schedule, context)
            again, _ = forward(workload, workspace, config, schedule, save_context=False)
            assert torch.equal(output, again)
        gradients = backward(workload, workspace, config, schedule, context)
        assert_same({"output": again, **gradients}, call_both(workload, workspace, config))

    LocalGroup(1).run(step)


def test_tensors_of_a_call_without_room() -> None:
    """They are one rank's own: its peers hear of it, and all can go on."""
    workload = make_workload([5, 3], I=2048, K=1)
    config = MoKConfig(macrobatch_size=2**17)

    def step(member: Any) -> str:
        workspace = workspace_for(workload, member, config, num_local_tokens=2**17)
        schedule = build(workload, workspace, config)
        output, _ = forward(workload, workspace, config, schedule, save_context=False)
        if member.rank() == 0:
            with room_for(2**28), pytest.raises(MemoryError) as caught:
                forward(workload, workspace, config, schedule)  # gate and up of the context: 512 MiB each
        else:
            with pytest.raises(MoKPeerError) as caught:
                forward(workload, workspace, config, schedule, save_context=False)
        again, _ = forward(workload, workspace, config, schedule, save_context=False)
        assert torch.equal(output, again)
        return str(caught.value)

    named, told = LocalGroup(2).run(step)
    assert re.search(r"forward: out of memory for the tensors of a call \(.* allocate 536870912 bytes", named)
    assert "num_local_tokens=131072 and macrobatch_size=131072" in named
    assert told == f"rank 0 raised MemoryError: {named}"


def test_the_advice_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a message names is one that doctor takes."""
    from mok_modular.cli import main

    sizes = Sizes(MoKConfig(), 2, 4096, 128, 2)
    shape = sizes.shape(4, sizes.capacity_rows(4), 192, 64, True)
    command = re.search(r"mok-modular (doctor .*) prints", sizes.explain_memory(shape, is_of_call=True))
    assert command is not None
    assert main(command[1].split()) == 0
    assert f"{sum(shape.region_bytes().values()) / 1e6:,.1f} MB" in capsys.readouterr().out


def test_regions_of_a_gpu_after_a_growth_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in place of a GPU: what was packed before is void, and the next call of the old size works."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    memory = CudaMemory.__new__(CudaMemory)
    memory.num_ranks, memory.device, memory.regions = 2, torch.device("cpu"), {0: {}, 1: {}}
    memory.tables, memory._counters_of, memory.layout = [], None, 0
    sizes = Sizes(MoKConfig(**SMALL_RING), 2, 100, 64, 2)
    small, large = (sizes.shape(4, sizes.capacity_rows(4), width, 0, False) for width in (64, 128))
    memory.reserve(small)
    before = memory.layout
    fill, num_made = torch.full, 0

    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_made
        num_made += 1
        if num_made == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.\nmore of it")
        return fill(*args, **kwargs)

    monkeypatch.setattr(torch, "full", full)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        memory.reserve(large)
    assert memory.layout != before
    memory.reserve(small)
    names = extension().region_names()
    for rank, table in enumerate(memory.tables):
        assert table.shape == (2, len(names))
        assert table[rank].tolist() == [memory.address(rank, name) for name in names]
