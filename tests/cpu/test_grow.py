"""A workspace that grows, or is replaced by a larger one, between the calls that belong together: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    FULL_RING,
    GRADIENTS,
    SMALL_RING,
    assert_same,
    backward,
    build,
    call_both,
    forward,
    make_layer,
    make_workload,
    recompute,
    weights_of,
    workspace_for,
)
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, MoKSchedule, functional
from mok_modular.calls.precision import pack_backward
from mok_modular.testing import Workload

NUM_TOKENS = {1: [37], 2: [60, 23], 4: [40, 0, 61, 9]}
"""By number of ranks. The growth below changes the number of blocks of tokens, of rows and of generations."""

CONFIGS = {
    "pull": (MoKConfig(**FULL_RING), "bf16"),
    "pull, small ring": (MoKConfig(**SMALL_RING), "bf16"),
    "pull, split, capacity": (MoKConfig(mode="split", schedule_capacity_multiplier=3.5, **SMALL_RING), "bf16"),
    "pull once": (MoKConfig(dispatch="pull_once", **FULL_RING), "bf16"),
    "pull once, split": (MoKConfig(mode="split", dispatch="pull_once", **FULL_RING), "bf16"),
    "push": (MoKConfig(dispatch="push", **FULL_RING), "bf16"),
    "push, pull combine": (MoKConfig(dispatch="push", combine="pull", **FULL_RING), "bf16"),
    "pull, mxfp8": (MoKConfig(**SMALL_RING), "mxfp8"),
    "pull, mxfp8 wire": (MoKConfig(mode="split", wire="mxfp8", **SMALL_RING), "mxfp8"),
    "push, mxfp8": (MoKConfig(dispatch="push", **FULL_RING), "mxfp8"),
}

Step = Callable[[Workload, functional.Workspace, MoKConfig, Callable[[], functional.Workspace]], dict[str, Tensor]]


def after_schedule(
    workload: Workload, workspace: functional.Workspace, config: MoKConfig, enlarge: Callable[[], functional.Workspace]
) -> dict[str, Tensor]:
    schedule = build(workload, workspace, config)
    workspace = enlarge()
    output, context = forward(workload, workspace, config, schedule)
    return {"output": output, **backward(workload, workspace, config, schedule, context)}


def after_forward(
    workload: Workload, workspace: functional.Workspace, config: MoKConfig, enlarge: Callable[[], functional.Workspace]
) -> dict[str, Tensor]:
    """With other calls on the larger workspace in between, whose schedules have other sizes."""
    schedule = build(workload, workspace, config)
    output, context = forward(workload, workspace, config, schedule)
    workspace = enlarge()
    call_both(workload, workspace, config)
    return {"output": output, **backward(workload, workspace, config, schedule, context)}


def before_recomputation(
    workload: Workload, workspace: functional.Workspace, config: MoKConfig, enlarge: Callable[[], functional.Workspace]
) -> dict[str, Tensor]:
    schedule = build(workload, workspace, config)
    output, _ = forward(workload, workspace, config, schedule, save_context=False)
    workspace = enlarge()
    context = recompute(workload, workspace, config, schedule)
    return {"output": output, **backward(workload, workspace, config, schedule, context)}


@pytest.mark.parametrize("how", ["grow", "get_workspace"])
@pytest.mark.parametrize("step", [after_schedule, after_forward, before_recomputation])
@pytest.mark.parametrize("num_ranks", list(NUM_TOKENS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_schedules_and_contexts_outlive_growth(name: str, num_ranks: int, step: Step, how: str) -> None:
    config, precision = CONFIGS[name]
    workload = _workload(num_ranks, precision)

    def on_rank(member: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def workspace(num_tokens: int) -> functional.Workspace:
            sizes = {"hidden_size": workload.shape.hidden_size, "topk": workload.shape.topk}
            return functional.get_workspace(config, member, num_local_tokens=num_tokens, **sizes)

        first = workspace(61)
        expected = call_both(workload, first, config)

        def enlarge() -> functional.Workspace:
            if how == "get_workspace":
                return workspace(400)
            first.grow(400)
            return first

        given = step(workload, first, config, enlarge)
        assert workspace(61).num_local_tokens == 400
        return given, expected

    for given, expected in LocalGroup(num_ranks).run(on_rank):
        assert_same(given, expected)


@pytest.mark.parametrize("num_ranks", list(NUM_TOKENS))
@pytest.mark.parametrize("name", [name for name, (config, _) in CONFIGS.items() if config.macrobatch_size == 131072])
def test_half_a_backward_outlives_growth(name: str, num_ranks: int) -> None:
    config, precision = CONFIGS[name]
    workload = _workload(num_ranks, precision)

    def on_rank(member: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        workspace, rank = workspace_for(workload, member, config, num_local_tokens=61), member.rank()
        expected = call_both(workload, workspace, config)
        del expected["output"]
        schedule = build(workload, workspace, config)
        context = forward(workload, workspace, config, schedule)[1]
        weights = weights_of(workload, member, pack_backward)
        x, d_output = workload.x[rank], workload.d_outputs()[rank]
        d_x, d_router, kept = functional.backward_dgrad(
            config, workspace, schedule, context, d_output, x, workload.router_weights[rank], *weights
        )
        workspace.grow(400)
        call_both(workload, workspace, config)
        gradients = functional.backward_wgrad(config, workspace, schedule, context, kept, d_output, x, *weights)
        return dict(zip(GRADIENTS, (d_x, d_router, *gradients), strict=True)), expected

    for given, expected in LocalGroup(num_ranks).run(on_rank):
        assert_same(given, expected)


@pytest.mark.parametrize("dispatch", ["pull", "pull_once", "push"])
def test_layers_outlive_growth(dispatch: str) -> None:
    """grow between the passes, and a second layer of the same sizes whose first call has more tokens."""
    config = MoKConfig(dispatch=dispatch, **FULL_RING)
    workload = _workload(2, "bf16")

    def on_rank(member: Any) -> list[Tensor]:
        rank = member.rank()
        arguments = workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank]
        gradients = []
        for enlarge in (lambda layer: None, lambda layer: layer.workspace.grow(400), None):
            layer, x = make_layer(workload, member, config), arguments[0].clone().requires_grad_()
            output = layer(x, *arguments[1:])
            if enlarge is not None:
                enlarge(layer)
            else:
                make_layer(workload, member, config, num_local_tokens=900)(*arguments)
                assert layer.workspace.num_local_tokens == 900
            output.backward(workload.d_outputs()[rank])
            gradients.append(x.grad)
        return gradients

    for first, *others in LocalGroup(2).run(on_rank):
        assert all(torch.equal(first, other) for other in others)


def test_a_schedule_that_was_taken_apart_is_named() -> None:
    """token_row may have the stride of another size of the workspace, but not one that a token lies beyond."""
    config = MoKConfig(dispatch="pull_once", **FULL_RING)
    workload = _workload(2, "bf16")

    def on_rank(member: Any) -> None:
        workspace = workspace_for(workload, member, config)
        schedule = build(workload, workspace, config)
        for cut in (schedule.token_row[:0], schedule.token_row[:-1], schedule.token_row[:100]):
            with pytest.raises(ValueError, match=r"schedule.token_row must be \[12[02]\]"):
                forward(workload, workspace, config, replace(schedule, token_row=cut))
        empty = {name: tensor[:0] for name, tensor in schedule.tensors().items()}
        with pytest.raises(ValueError, match=r"schedule.peer_rank must hold row blocks of 128 rows, got \[0\]"):
            forward(workload, workspace, config, MoKSchedule(**empty))
        forward(workload, workspace, config, schedule)

    LocalGroup(2).run(on_rank)


def _workload(num_ranks: int, precision: str) -> Workload:
    sizes = {"H": 128, "I": 128, "S": 128} if precision == "mxfp8" else {}
    return make_workload(NUM_TOKENS[num_ranks], precision=precision, K=3, **sizes)
