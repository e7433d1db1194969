"""mok.capture_routing: what the routers of a running model chose, in a file that everything else replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_layer, make_workload
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mok_modular as mok
from mok_modular import LocalGroup, MoKPeerError
from mok_modular.cli import main
from mok_modular.testing import Workload

NUM_TOKENS = [40, 7]


class Model(nn.Module):
    """Two layers, one after the other, on the workload's choices; the second gets them upside down."""

    def __init__(self, workload: Workload, member: Any, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(workload, member) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer, choices in zip(self.layers, ((ids, weights), (ids.flip(0), weights.flip(0))), strict=True):
            if self.is_checkpointed:
                x = checkpoint(layer, x, *choices, use_reentrant=False)
            else:
                x = layer(x, *choices)
        return x


def expected(workload: Workload) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Ids and weights by capture and rank."""
    weights = [w.masked_fill(ids < 0, 0) for ids, w in zip(workload.expert_ids, workload.router_weights, strict=True)]
    first = (workload.expert_ids, weights)
    return [first, tuple([t.flip(0) for t in part] for part in first)]


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_training_step_is_captured(tmp_path: Path, is_checkpointed: bool) -> None:
    workload = make_workload(NUM_TOKENS)
    path = tmp_path / "routing.pt"

    def step(member: Any) -> mok.Routing:
        rank = member.rank()
        model = Model(workload, member, is_checkpointed=is_checkpointed)
        inputs = (workload.x[rank].clone().requires_grad_(), workload.expert_ids[rank], workload.router_weights[rank])
        model(*inputs).sum().backward()  # outside of the block: not kept
        with mok.capture_routing(model, path, source="a test") as capture:
            model(*inputs).sum().backward()
        model(*inputs)
        assert capture.routing is not None
        return capture.routing

    for routing in (*LocalGroup(2).run(step), mok.load_routing(path)):
        assert routing.source == "a test"
        assert routing.num_experts == 8
        assert routing.shape is not None
        assert (routing.shape.hidden_size, routing.shape.intermediate_size) == (64, 128)
        assert routing.num_tokens.tolist() == [NUM_TOKENS, NUM_TOKENS]
        for capture, (ids, weights) in enumerate(expected(workload)):
            for rank, count in enumerate(NUM_TOKENS):
                assert torch.equal(routing.expert_ids[capture, rank, :count], ids[rank].int())
                assert torch.equal(routing.router_weights[capture, rank, :count], weights[rank])


def test_a_compiled_layer_is_captured() -> None:
    workload = make_workload([9])
    torch.compiler.reset()

    def step(member: Any) -> None:
        layer = make_layer(workload, member)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch.no_grad(), mok.capture_routing(compiled) as capture:
            for _ in range(2):
                compiled(workload.x[0], workload.expert_ids[0], workload.router_weights[0])
        assert capture.routing is not None
        assert len(capture.routing.expert_ids) == 2

    LocalGroup(1).run(step)


def test_run_replays_a_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the sizes of the captured layer and the number of tokens that every rank had."""
    workload = make_workload(NUM_TOKENS)
    path = tmp_path / "routing.pt"

    def step(member: Any) -> None:
        rank = member.rank()
        layer = make_layer(workload, member)
        with torch.no_grad(), mok.capture_routing(layer, path):
            layer(workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])

    LocalGroup(2).run(step)
    assert main(["run", "--routing", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_tokens"] == NUM_TOKENS
    assert report["shape"]["shared_intermediate_size"] == 192
    by_name = {stage["name"]: stage for stage in report["stages"] if stage["pass"] == "forward"}
    assert by_name["dispatch"]["num_rows"] == sum(int((ids >= 0).sum()) for ids in workload.expert_ids)


def test_what_cannot_be_captured_is_named() -> None:
    member = LocalGroup(1).members[0]
    layers = [mok.MoE(64, 128, num_experts, 2, group=member) for num_experts in (4, 8)]
    other = mok.MoE(64, 128, 4, 2, group=LocalGroup(1))
    for module, words in (
        (nn.Linear(2, 2), "a MoE layer or hold one, got a Linear"),
        (nn.ModuleList(layers), r"one E and K, got \(E, K\) of \(4, 2\), \(8, 2\)"),
        (nn.ModuleList([layers[0], other]), "of one group"),
        (layers[0], r"once at least; calls: \[0\]"),
    ):
        with pytest.raises(ValueError, match=words), mok.capture_routing(module):
            pass


def test_an_error_inside_ends_the_capture() -> None:
    workload = make_workload([5, 5])
    layers = {}

    def step(member: Any) -> None:
        layers[member.rank()] = layer = make_layer(workload, member)
        with mok.capture_routing(layer):
            if member.rank() == 1:
                raise ZeroDivisionError
            with torch.no_grad():
                layer(workload.x[0], workload.expert_ids[0], workload.router_weights[0])

    with pytest.raises(ZeroDivisionError) as caught:
        LocalGroup(2).run(step)
    assert not isinstance(caught.value, MoKPeerError)
    assert not any(layer.recorders for layer in layers.values())
