"""Signals of a backward that are lost: the right error, NaN gradients, and a workspace that works after reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SMALL_RING, build, forward, make_workload, weights_of, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKDeadlockError, MoKTimeoutError, functional
from mok_modular.calls.precision import pack_backward
from mok_modular.protocol.roster import roster
from mok_modular.testing import Workload

FUSED = [
    "input_ready",
    "done",
    "x_ready",
    "gate_up_ready",
    "slot_free",
    "d_y_ready",
    "d_gate_up_ready",
    "segment_ready",
]
FUSED += ["carry_done", "shared_d_gate_up_ready", "shared_ready", "published", "exited"]
SPLIT = [*FUSED, "d_hidden_ready", "d_x_ready"]
MODES = {"fused": FUSED, "split": SPLIT, "dispatch|gate_up+swiglu+down|combine": SPLIT[:-2]}

# What is counted on the way to another signal: the wait that is left over is for that one.
LEADS_TO = {"published": {"published", "input_ready", "done"}, "exited": {"done"}}


def make(**options: Any) -> Workload:
    """Expert 2 of rank 0 and 7 of rank 1 go on across several macrobatches; the others have some rows."""

    def routing(rank: int, count: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(-1, 8, (count, 2), generator=generator)
        ids[: count // 2, 0], ids[count // 2 :, 1] = 2, 7
        return ids

    return make_workload([290, 280], routing=routing, **options)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make()


@pytest.fixture(scope="module")
def mxfp8_workload() -> Workload:
    return make(H=128, I=256, S=384, precision="mxfp8")


def backward(workload: Workload, workspace: functional.Workspace, config: MoKConfig) -> tuple[Tensor | None, ...]:
    rank = workspace.member.rank()
    schedule = build(workload, workspace, config)
    _, context = forward(workload, workspace, config, schedule)
    d_output = workload.x[rank].roll(1, 0)
    x, router_weights = workload.x[rank], workload.router_weights[rank]
    weights = weights_of(workload, workspace.member, pack_backward)
    workspace.shared.lost_signals = list(getattr(workspace.shared, "lost_in_backward", []))
    try:
        return functional.backward(config, workspace, schedule, context, d_output, x, router_weights, *weights)
    finally:
        workspace.shared.lost_signals = []


def fail_and_recover(workload: Workload, config: MoKConfig, signal: tuple[str, int, int, int], **group: Any) -> None:
    edge, at_rank, _, _ = signal

    def step(member: Any) -> Exception:
        workspace = workspace_for(workload, member, config)
        expected = backward(workload, workspace, config)
        workspace.shared.lost_in_backward = [signal]
        with pytest.raises(MoKTimeoutError) as caught:
            backward(workload, workspace, config)
        workspace.shared.lost_in_backward = []
        workspace.reset()
        for _ in range(2):  # both parities
            for found, want in zip(backward(workload, workspace, config), expected, strict=True):
                assert torch.equal(found, want)
        return caught.value

    for error in LocalGroup(2, num_workers=4, **group).run(step):
        assert isinstance(error, MoKTimeoutError)
        first = str(error).splitlines()[0]
        assert first.startswith("backward: ")
        assert any(
            f"nobody will publish {wait['edge']}[{wait['index']}]: rank {wait['rank']}, {wait['stage']} task" in first
            and (wait["peer"] if wait["peer"] >= 0 else wait["rank"]) == at_rank
            for wait in error.waits
            if wait["edge"] in LEADS_TO.get(edge, {edge})
        ), str(error)


def test_every_edge_of_a_backward_is_lost() -> None:
    edges = roster().edge_names
    of_backward = set(edges[edges.index("d_y_ready") : edges.index("published")])
    assert of_backward < {edge for lost in MODES.values() for edge in lost}


@pytest.mark.parametrize(("mode", "edge"), [(mode, edge) for mode, edges in MODES.items() for edge in edges])
def test_a_lost_signal_is_a_deadlock(workload: Workload, mode: str, edge: str) -> None:
    fail_and_recover(workload, MoKConfig(mode=mode, **SMALL_RING), (edge, 1, -1, -1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edge", ["d_gate_up_ready", "segment_ready", "slot_free"])
def test_a_lost_signal_around_quantize(mxfp8_workload: Workload, mode: str, edge: str) -> None:
    fail_and_recover(mxfp8_workload, MoKConfig(mode=mode, wire="mxfp8", **SMALL_RING), (edge, 1, -1, -1))


@pytest.mark.parametrize("edge", ["d_y_ready", "segment_ready", "carry_done", "slot_free"])
def test_a_lost_signal_is_a_timeout_on_threads(workload: Workload, edge: str) -> None:
    config = MoKConfig(mode="split", **SMALL_RING, timeout_s=0.3, start_timeout_s=0.3)
    fail_and_recover(workload, config, (edge, 0, -1, -1), executor="threads")


def test_gradients_of_an_aborted_backward_are_nan(workload: Workload) -> None:
    config = MoKConfig(mode="fused", **SMALL_RING)
    main_grads = [[torch.zeros_like(w, dtype=torch.float32) for w in _main_order(workload, rank)] for rank in range(2)]

    def step(member: Any) -> list[Tensor]:
        rank = member.rank()
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        _, context = forward(workload, workspace, config, schedule)
        seen: list[Tensor] = []
        if rank == 0:
            workspace.shared.lost_signals = [("segment_ready", 0, -1, -1), ("segment_ready", 1, -1, -1)]
            run_calls = workspace.shared.run

            def run_and_look(calls: Any) -> Any:
                seen.extend(c.tensors[name] for c in calls for name in ("output", "d_router"))
                return run_calls(calls)

            workspace.shared.run = run_and_look
        x, router_weights = workload.x[rank], workload.router_weights[rank]
        with pytest.raises(MoKDeadlockError):
            functional.backward(
                config,
                workspace,
                schedule,
                context,
                x.clone(),
                x,
                router_weights,
                *weights_of(workload, member),
                main_grads=main_grads[rank],
            )
        return seen

    seen, _ = LocalGroup(2).run(step)
    assert len(seen) == 4
    for tensor in [*seen, *main_grads[0], *main_grads[1]]:
        assert tensor.isnan().all()


def _main_order(workload: Workload, rank: int) -> list[Tensor]:
    mine = workload.weights.of_rank(rank, 2)
    tensors = [mine.shared_gate, mine.routed_gate, mine.shared_up, mine.routed_up, mine.shared_down, mine.routed_down]
    return [tensor for tensor in tensors if tensor is not None]
