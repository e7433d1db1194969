"""torch.compile(fullgraph=True) traces the layer: the same bits, one graph for all ranks and layers, autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, make_layer, make_workload, same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from mok_modular import LocalGroup, MoKConfig, torch_ops
from mok_modular.testing import Workload

CONFIG = MoKConfig(mode="split", **SMALL_RING)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    """A router, two layers that share a workspace, and arithmetic around them."""

    def __init__(self, workload: Workload, member: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(workload, member, CONFIG, num_local_tokens=80) for _ in range(2))
        generator = torch.Generator().manual_seed(3)
        self.router = nn.Parameter(torch.randn(8, 64, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights, ids = (x.float() @ self.router.T).softmax(-1).topk(2)
            x = x + layer(x, ids, weights)
        return x


def train(workload: Workload, backend: str | None, *, num_steps: int = 2, dynamic: bool | None = None) -> list[Any]:
    """By rank: outputs and gradients of a few steps with other numbers of tokens each time."""

    def step(member: Any) -> list[Tensor]:
        model = Model(workload, member)
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic) if backend else model
        found = []
        for i in range(num_steps):
            x = workload.x[member.rank()][: len(workload.x[member.rank()]) - 3 * i].clone().requires_grad_()
            output = run(x)
            model.zero_grad()
            output.backward(workload.d_outputs()[member.rank()][: len(x)])
            found += [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            with torch.no_grad():
                found.append(run(x))
        return found

    return LocalGroup(workload.num_ranks).run(step)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_the_eager_one(backend: str) -> None:
    workload = make_workload([60, 80])
    expected, given = train(workload, None), train(workload, backend)
    for rank in range(2):
        assert len(given[rank]) == len(expected[rank])
        for a, b in zip(given[rank], expected[rank], strict=True):
            if backend == "inductor":  # it rounds the sums around the layer elsewhere
                torch.testing.assert_close(a, b, rtol=2**-5, atol=2**-5 * float(b.abs().max()))
            else:
                assert same_bits(a, b)


def test_one_graph_serves_all_ranks_and_layers() -> None:
    """Which layer and rank it is stands in a tensor, not in the graph."""
    counter = CompileCounter()

    def step(workload: Workload, member: Any) -> None:
        rank = member.rank()
        inputs = (workload.x[rank], workload.expert_ids[rank], workload.router_weights[rank])
        for _ in range(2):
            layer = make_layer(workload, member, CONFIG)
            with torch.no_grad():
                assert same_bits(torch.compile(layer, backend=counter, fullgraph=True)(*inputs), layer(*inputs))

    for num_ranks in (1, 4):  # one rank first: four threads that meet an empty cache would all compile
        workload = make_workload([40] * num_ranks, E=8 * num_ranks)
        LocalGroup(num_ranks).run(lambda member, workload=workload: step(workload, member))
    assert counter.frame_count == 1


def test_counts_of_zero_and_one() -> None:
    """A compiler treats these sizes as constants; the ranks need not agree on them."""
    workload = make_workload([0, 1, 30, 7])

    def step(member: Any) -> None:
        layer = make_layer(workload, member, CONFIG)
        rank = member.rank()
        inputs = (workload.x[rank].clone().requires_grad_(), workload.expert_ids[rank], workload.router_weights[rank])
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            inputs[0].grad = None
            run(*inputs).backward(workload.d_outputs()[rank])
            results.setdefault(rank, []).append(inputs[0].grad)

    results: dict[int, list[Tensor]] = {}
    LocalGroup(4).run(step)
    for eager, compiled in results.values():
        assert same_bits(eager, compiled)


def test_compiled_with_checkpointing() -> None:
    workload = make_workload([30, 20])

    def step(member: Any) -> list[Tensor]:
        layer = make_layer(workload, member, CONFIG)
        rank = member.rank()
        x = workload.x[rank].clone().requires_grad_()

        def checkpointed(x: Tensor) -> Tensor:
            ids, weights = workload.expert_ids[rank], workload.router_weights[rank]
            return checkpoint(layer, x, ids, weights, use_reentrant=False)

        gradients = []
        for run in (checkpointed, torch.compile(checkpointed, backend="aot_eager", fullgraph=True)):
            x.grad = None
            run(x).backward(workload.d_outputs()[rank])
            gradients.append(x.grad)
        return gradients

    for eager, compiled in LocalGroup(2).run(step):
        assert same_bits(eager, compiled)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_compiled_with_main_grads(precision: str) -> None:
    workload = make_workload([30, 20], H=128, S=128, precision=precision)

    def step(member: Any) -> list[list[Tensor]]:
        rank = member.rank()
        results = []
        for is_compiled in (False, True):
            layer = make_layer(workload, member, CONFIG)
            mains = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in layer.named_parameters()}
            layer.main_grads = mains
            run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
            x = workload.x[rank].clone().requires_grad_()
            run(x, workload.expert_ids[rank], workload.router_weights[rank]).backward(workload.d_outputs()[rank])
            assert all(parameter.grad is None for parameter in layer.parameters())
            results.append([x.grad, *mains.values()])
        return results

    for eager, compiled in LocalGroup(2).run(step):
        for a, b in zip(eager, compiled, strict=True):
            assert a.abs().sum() > 0
            assert same_bits(a, b)


def test_the_operators_keep_their_contract() -> None:
    """torch's own checks: schema, fake implementation, autograd registration, tracing with dynamic shapes."""
    workload = make_workload([20])
    member = LocalGroup(1).members[0]
    layer = make_layer(workload, member, CONFIG, num_local_tokens=20)
    handle = layer._state.handle
    ids = workload.expert_ids[0]
    schedule = torch_ops.build_schedule(ids, handle)
    weights = [None if w is None else w.detach() for w in layer._weights()]
    inputs = (workload.x[0], workload.router_weights[0], *weights)
    output, *context = torch_ops.forward(*inputs, list(schedule), ids, handle, True, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch_ops.build_schedule, (ids, handle), test_utils=checks)
    asking = [None if t is None else t.clone().requires_grad_() for t in inputs]
    torch.library.opcheck(torch_ops.forward, (*asking, list(schedule), ids, handle, True, False), test_utils=checks)
    d_output = torch.ones_like(output)
    torch.library.opcheck(
        torch_ops.backward, (d_output, *inputs, list(schedule), context, handle, False), test_utils=checks
    )
