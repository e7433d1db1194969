"""Ranks that are processes, as far as they meet on the host: three processes on CPUs that pretend to have a GPU."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

import mok_modular as mok
from mok_modular.calls.copies import compare_copies
from mok_modular.config import MoKConfig
from mok_modular.ranks.group import as_member
from mok_modular.ranks.process_group import ProcessRanks, process_member

NUM_RANKS = 3


def _body(rank: int, folder: str, check: Callable[[ProcessRanks], None]) -> None:
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    try:
        check(process_member(distributed.group.WORLD).group)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _run(folder: Path, check: Callable[[ProcessRanks], None]) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_body, args=(rank, str(folder), check)) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * NUM_RANKS


def _check_meetings(ranks: ProcessRanks) -> None:
    rank = ranks.rank()
    for number in range(3):
        assert ranks.exchange("sum", rank * number, 20) == [0, number, 2 * number]
    assert ranks.meet(rank, "largest", rank, lambda all_ranks: [max(all_ranks)] * 3, 20) == 2
    assert ranks.meet(rank, "alone", rank, lambda mine: [mine], 20, is_checked_later=True) == [rank]

    error = ValueError("no room") if rank == 1 else None
    with pytest.raises(ValueError if rank == 1 else mok.MoKPeerError, match="no room") as caught:
        ranks.exchange("grow", error, 20)
    assert rank == 1 or caught.value.rank == 1

    with pytest.raises(mok.MoKPeerError, match="rank 0: reset, rank 1: grow, rank 2: grow"):
        ranks.exchange("reset" if rank == 0 else "grow", None, 20)

    def act(all_ranks: list[int]) -> list[Exception | int]:
        return [all_ranks[0], ValueError("mine"), all_ranks[2]]

    if rank == 1:
        with pytest.raises(ValueError, match="mine"):
            ranks.meet(rank, "act", rank, act, 20)
    else:
        assert ranks.meet(rank, "act", rank, act, 20) == rank


def _check_reports_and_losses(ranks: ProcessRanks) -> None:
    rank = ranks.rank()
    if rank != 2:
        ranks.post("failure", {"text": f"from {rank}"})
    ranks.exchange("posted", None, 20)
    begin = time.monotonic()
    assert ranks.reports("failure", [0, 1, 2], 0.3) == {0: {"text": "from 0"}, 1: {"text": "from 1"}}
    assert time.monotonic() - begin < 5
    assert ranks.decide("leave", f"proposal {rank}") == ranks.decide("leave", "another")
    if rank == 2:
        time.sleep(2)  # and never comes
        return
    with pytest.raises(
        mok.MoKTimeoutError, match=r"reset: no call from rank 2 within start_timeout_s=0\.5 s"
    ) as caught:
        ranks.exchange("reset", None, 0.5)
    assert caught.value.waits[0]["peer"] == 2


def _check_member(ranks: ProcessRanks) -> None:
    member = as_member(distributed.group.WORLD)
    assert member is process_member(distributed.group.WORLD)
    assert (member.rank(), member.size(), member.group) == (ranks.rank(), NUM_RANKS, ranks)
    assert as_member(member) is member
    assert repr(member) == f"ProcessMember(rank={ranks.rank()}, size=3)"
    assert ranks.global_ranks() == [0, 1, 2]


def _check_copies(ranks: ProcessRanks) -> None:
    """Compared and named, broadcast, clipped: of a layer that is built here and not called."""
    rank, member = ranks.rank(), as_member(distributed.group.WORLD)
    ranks.device, device = "cpu", ranks.device
    torch.manual_seed(1234 + rank)
    layer = mok.MoE(64, 64, 6, 2, member, shared_intermediate_size=64)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    shared = {name: before[name] for name in ("w_shared_gate", "w_shared_up", "w_shared_down")}
    with pytest.raises(ValueError, match=r"w_shared_gate on rank 1, 2; w_shared_up on rank 1, 2; .*broadcast_copies"):
        compare_copies(member, shared, 20)
    mok.broadcast_copies(layer)
    compare_copies(member, {name: getattr(layer, name) for name in shared}, 20)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name]) is (rank == 0 or "routed" in name), name

    def set_gradients() -> None:
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.full_like(parameter, 1 + rank if "routed" in name else 2)

    set_gradients()
    norm = mok.clip_grad_norm_(layer, 1.0)
    squares = (1 + 4 + 9) * 3 * 2 * 64 * 64 + 4 * 3 * 64 * 64
    assert norm.item() == pytest.approx(squares**0.5, rel=1e-6)
    assert layer.w_shared_up.grad[0, 0].item() == pytest.approx(2 / squares**0.5, rel=2**-8)
    set_gradients()
    if rank == 2:
        layer.w_shared_up.grad.zero_()
    with pytest.raises(ValueError, match=r"their gradients differ: w_shared_up\."):
        mok.clip_grad_norm_(layer, 1.0)
    with pytest.raises(ValueError, match="got rank 0: 3, rank 1: 3, rank 2: 0"):
        mok.clip_grad_norm_(layer.w_routed_up if rank == 2 else layer, 1.0)
    ranks.device = device


def _check_all(ranks: ProcessRanks) -> None:
    _check_member(ranks)
    _check_copies(ranks)
    _check_meetings(ranks)
    _check_reports_and_losses(ranks)


def test_ranks_meet_through_the_store(tmp_path: Path) -> None:
    _run(tmp_path, _check_all)


def test_a_process_group_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match=r"needs an NVIDIA GPU.*LocalGroup"):
            as_member(distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()


def test_no_process_group_is_said_by_type() -> None:
    with pytest.raises(TypeError, match=r"ProcessGroup, got NoneType"):
        as_member(distributed.group.WORLD)


def test_signals_of_nvshmem_need_processes() -> None:
    config = MoKConfig(signals="nvshmem")
    with pytest.raises(ValueError, match=r"signals='nvshmem'.*LocalGroup"):
        mok.functional.get_workspace(config, mok.LocalGroup(1), num_local_tokens=4, hidden_size=64, topk=1)
