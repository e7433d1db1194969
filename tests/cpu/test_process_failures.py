"""What a rank that is a process says about a failed call, from what its kernels left and what its peers report."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import mok_modular as mok
from mok_modular.targets.cuda.process import ProcessWorkspace


class Ranks:
    """The group's store, with the reports of the peers in it."""

    def __init__(self, reports: dict[str, dict[int, Any]]) -> None:
        self.there = reports
        self.posted: dict[str, Any] = {}

    def post(self, key: str, report: Any) -> None:
        self.posted[key] = report

    def reports(self, key: str, ranks: Sequence[int], patience_s: float) -> dict[int, Any]:
        assert patience_s > 0
        return {rank: self.there.get(key, {})[rank] for rank in ranks if rank in self.there.get(key, {})}


def report(reason: str, text: str = "", waits: Sequence[dict[str, Any]] = (), raised_by: int = -1) -> dict[str, Any]:
    return {"reason": reason, "text": text, "waits": list(waits), "raised_by": raised_by}


def failure(reason: str, rank: int = 0, peer: int = 2, **more: Any) -> dict[str, Any]:
    place = {"stage": "publish", "block": 0, "part": 0, "task": "0.0", "edge": "input_ready", "index": peer}
    return {"is_set": True, "reason": reason, "rank": rank, "peer": peer, "raised_by": -1, "num_invalid_ids": 0} | {
        **place,
        "have": 4,
        "want": 5,
        **more,
    }


def explain(found: dict[str, Any], reports: dict[int, Any], calls: dict[int, Any] | None = None) -> tuple[Any, Ranks]:
    """The error of rank 0 of 3."""
    workspace = ProcessWorkspace.__new__(ProcessWorkspace)
    ranks = Ranks({"7/0": reports, "7/0/calls": calls or {}})
    workspace.ranks, workspace.num_ranks, workspace.failure = (0,), 3, None
    workspace._ranks, workspace._number, workspace._recent = ranks, 7, [(9, "forward", {"mode": "split", "topk": 2})]
    workspace.native = SimpleNamespace(generation=0)
    workspace.runtime = SimpleNamespace(is_healthy=True)
    workspace.config = mok.MoKConfig()
    error = workspace._explain([found])
    assert not workspace.runtime.is_healthy, "a rank may be gone: nothing collective any more"
    assert "7/0" in ranks.posted
    return error, ranks


def test_a_wait_that_expired_names_rank_and_edge_with_the_waits_of_the_others() -> None:
    other = failure("aborted", rank=1, edge="done", stage="reduce")
    error, ranks = explain(failure("timeout"), {1: report("aborted", waits=[other], raised_by=0)})
    assert isinstance(error, mok.MoKTimeoutError)
    assert "nobody will publish input_ready[2]: rank 0" in str(error)
    assert [(wait["rank"], wait["edge"]) for wait in error.waits] == [(0, "input_ready"), (1, "done")]
    assert ranks.posted["7/0"]["reason"] == "timeout"


def test_the_end_is_followed_to_the_rank_that_began_it() -> None:
    begun = report("timeout", waits=[failure("timeout", rank=2, peer=1)])
    error, _ = explain(failure("aborted", raised_by=1), {1: report("aborted", raised_by=2), 2: begun})
    assert isinstance(error, mok.MoKTimeoutError)
    assert {wait["rank"] for wait in error.waits} == {0, 2}

    begun = report("error", "forward: rank 2 raised TypeError: x must be torch.bfloat16")
    error, _ = explain(failure("aborted", raised_by=1), {1: report("aborted", raised_by=2), 2: begun})
    assert isinstance(error, mok.MoKPeerError)
    assert (error.rank, str(error)) == (2, begun["text"])


@pytest.mark.parametrize("reports", [{}, {1: report("aborted", raised_by=1)}])
def test_a_peer_that_does_not_say_why_is_named_all_the_same(reports: dict[int, Any]) -> None:
    error, _ = explain(failure("aborted", raised_by=1, edge="", peer=-1), reports)
    assert isinstance(error, mok.MoKPeerError)
    assert "rank 1 ended the call" in str(error)


def test_different_calls_and_different_arguments_are_named() -> None:
    kinds = {"own_call": "forward", "peer_call": "build_schedule", "order": 9}
    error, ranks = explain(failure("mismatch", **kinds), {})
    assert isinstance(error, mok.MoKPeerError)
    assert "rank 0: forward, rank 2: build_schedule" in str(error)
    assert ranks.posted["7/0"]["text"] == str(error)

    kinds["peer_call"] = "forward"
    error, _ = explain(failure("mismatch", **kinds), {}, {2: [(9, "forward", {"mode": "fused", "topk": 2})]})
    assert "ranks differ in mode (rank 0: split, rank 2: fused)" in str(error)
    error, _ = explain(failure("mismatch", **kinds), {})
    assert "ranks differ in an argument" in str(error)


def test_too_many_rows_are_told_with_both_numbers() -> None:
    error, ranks = explain(failure("capacity", have=128, want=384, edge="", peer=-1), {})
    assert isinstance(error, ValueError)
    assert "384 rows come to rank 0" in str(error)
    assert ranks.posted["7/0"]["text"] == str(error)
