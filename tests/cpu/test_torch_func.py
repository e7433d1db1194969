"""What torch offers around a layer: torch.func, export, FLOP counts, compilation with graph breaks."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_layer, make_workload, same_bits
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

import mok_modular as mok

WORKLOAD = make_workload([40, 30])


class Part:
    """One rank's layer, inputs and weights."""

    def __init__(self, member: Any) -> None:
        rank = member.rank()
        self.layer = make_layer(WORKLOAD, member)
        self.x, self.router_weights = WORKLOAD.x[rank], WORKLOAD.router_weights[rank]
        self.ids = WORKLOAD.expert_ids[rank]
        self.parameters = {name: p.detach() for name, p in self.layer.named_parameters()}

    def loss(self, x: Tensor, router_weights: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        inputs = (x, self.ids, router_weights)
        output = self.layer(*inputs) if parameters is None else functional_call(self.layer, parameters, inputs)
        return output.float().square().sum()

    def by_autograd(self) -> list[Tensor]:
        """Gradients of x, router_weights and the parameters."""
        asking = [t.clone().requires_grad_() for t in (self.x, self.router_weights)]
        return list(torch.autograd.grad(self.loss(*asking), [*asking, *self.layer.parameters()]))


def on_ranks(fn: Callable[[Part], Any], num_ranks: int = 2) -> list[Any]:
    return mok.LocalGroup(num_ranks).run(lambda member: fn(Part(member)))


def assert_all_same(given: list[Tensor], wanted: list[Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(given, wanted, strict=True)] == [True] * len(wanted)


# ---- torch.func ----


def test_func_grad_gives_autograds_bits() -> None:
    def step(part: Part) -> None:
        wanted = part.by_autograd()
        assert_all_same(list(grad(part.loss, argnums=(0, 1))(part.x, part.router_weights)), wanted[:2])
        gradients, value = grad_and_value(part.loss, argnums=2)(part.x, part.router_weights, part.parameters)
        assert_all_same(list(gradients.values()), wanted[2:])
        assert torch.equal(value, part.loss(part.x, part.router_weights).detach())

    on_ranks(step)


def test_func_vjp_of_a_layer_that_is_gone() -> None:
    def step(part: Part) -> None:
        wanted = part.by_autograd()
        value, pull = vjp(part.loss, part.x, part.router_weights)
        del part.layer
        assert_all_same(list(pull(torch.ones_like(value))), wanted[:2])

    on_ranks(step)


def test_a_router_inside_func_grad() -> None:
    """Ids come from a transformed tensor then."""
    router = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) / 8

    def step(part: Part) -> None:
        def loss(x: Tensor) -> Tensor:
            weights, ids = (x.float() @ router.T).softmax(-1).topk(2)
            return part.layer(x, ids, weights).float().square().sum()

        x = part.x.clone().requires_grad_()
        assert_all_same([grad(loss)(part.x)], list(torch.autograd.grad(loss(x), x)))

    on_ranks(step)


def test_main_grads_in_func_grad() -> None:
    def step(part: Part) -> None:
        wanted = part.by_autograd()
        mains = {name: torch.zeros_like(p) for name, p in part.parameters.items()}
        part.layer.main_grads = mains
        assert_all_same([grad(part.loss)(part.x, part.router_weights)], wanted[:1])
        assert_all_same(list(mains.values()), wanted[2:])

    on_ranks(step)


def test_forward_mode_is_refused_and_not_zero() -> None:
    def step(part: Part) -> None:
        for is_frozen in (False, True):
            part.layer.requires_grad_(not is_frozen)
            for argument in range(2):
                given = [part.x, part.router_weights]

                def loss(tensor: Tensor, given: list[Tensor] = given, argument: int = argument) -> Tensor:
                    return part.loss(*(tensor if i == argument else t for i, t in enumerate(given)))

                with pytest.raises(NotImplementedError, match="MoE layer has no forward-mode derivatives"):
                    jvp(loss, (given[argument],), (given[argument],))
                with pytest.raises(NotImplementedError, match="forward_ad"), forward_ad.dual_level():
                    loss(forward_ad.make_dual(given[argument], given[argument]))
        with forward_ad.dual_level():  # nothing to differentiate
            assert not part.loss(part.x, part.router_weights).isnan()

    on_ranks(step, num_ranks=1)  # torch counts levels of forward mode for all threads together


def test_vmap_is_refused() -> None:
    def step(part: Part) -> None:
        stacked = torch.stack([part.x, part.x])
        ids = torch.stack([part.ids, part.ids])
        for call in (
            lambda: vmap(part.layer, in_dims=(0, 0, None))(stacked, ids, part.router_weights),
            lambda: vmap(part.layer, in_dims=(0, None, None))(stacked, part.ids, part.router_weights),
            lambda: vmap(grad(part.loss), in_dims=(0, None))(stacked, part.router_weights),
        ):
            with pytest.raises(NotImplementedError, match="a MoE layer cannot be vmapped"):
                call()

    on_ranks(step)


@pytest.mark.parametrize("is_functional", [False, True])
def test_second_derivatives_are_refused(is_functional: bool) -> None:
    def step(part: Part) -> None:
        with pytest.raises(NotImplementedError, match="a MoE layer has first derivatives only"):
            if is_functional:
                grad(lambda x: grad(part.loss)(x, part.router_weights).float().sum())(part.x)
            else:
                x = part.x.clone().requires_grad_()
                (d_x,) = torch.autograd.grad(part.loss(x, part.router_weights), x, create_graph=True)
                d_x.float().sum().backward()

    on_ranks(step)


# ---- export ----


@pytest.mark.parametrize("is_frozen", [False, True])
def test_export(is_frozen: bool) -> None:
    workload = make_workload([20])
    layer = make_layer(workload, mok.LocalGroup(1).members[0], num_local_tokens=20)
    layer.requires_grad_(not is_frozen)
    inputs = (workload.x[0], workload.expert_ids[0], workload.router_weights[0])
    program = torch.export.export(layer, inputs)
    output, wanted = program.module()(*inputs), layer(*inputs)
    assert same_bits(output, wanted)
    assert output.requires_grad is wanted.requires_grad is not is_frozen
    if not is_frozen:
        module = program.module()
        module(*inputs).float().square().sum().backward()
        layer(*inputs).float().square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert same_bits(module.get_parameter(name).grad, parameter.grad), name


def test_an_exported_program_whose_layer_is_gone() -> None:
    workload = make_workload([20])
    inputs = (workload.x[0], workload.expert_ids[0], workload.router_weights[0])
    program = torch.export.export(make_layer(workload, mok.LocalGroup(1).members[0]).requires_grad_(False), inputs)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    del program
    gc.collect()
    with pytest.raises(RuntimeError, match=r"layer of this call is gone: .* in the process that exported it"):
        torch.export.load(file).module()(*inputs)


# ---- FLOPs ----


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shared_size", [0, 256])
def test_flops(precision: str, shared_size: int) -> None:
    """Three products a route and three for the shared expert; twice as many in a backward. A missing route counts."""
    workload = make_workload([30], H=128, I=384, S=shared_size, K=3, precision=precision)
    layer = make_layer(workload, mok.LocalGroup(1).members[0])
    x, ids, weights = workload.x[0], workload.expert_ids[0], workload.router_weights[0]
    assert (ids < 0).any()
    forward = 3 * 2 * 30 * 128 * (3 * 384 + shared_size)
    with FlopCounterMode(display=False) as counter:
        with torch.no_grad():
            layer(x, ids, weights)
        assert counter.get_total_flops() == forward
        output = layer(x, ids, weights)
        assert counter.get_total_flops() == 2 * forward
        output.sum().backward()
        assert counter.get_total_flops() == 4 * forward
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.mok_modular.backward] == 2 * forward


# ---- compilation with graph breaks ----

SCRIPT = """
import torch, mok_modular as mok
from torch import nn
class Block(nn.Module):
    def __init__(self, member):
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.moe = mok.MoE(64, 64, 8, 2, member, num_local_tokens=30)
    def forward(self, x):
        weights, ids = self.router(x.float()).softmax(-1).topk(2)
        return x + self.moe(x, ids, weights)
def step(member):
    model = models[member.rank()]
    losses = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        for count in (30, 29):
            x = torch.randn(count, 64, generator=torch.Generator().manual_seed(count)).bfloat16().requires_grad_()
            loss = run(x).float().square().sum()
            loss.backward()
            losses.append((loss.item(), x.grad.float().sum().item()))
    assert losses[:2] == losses[2:]
group = mok.LocalGroup(2)
models = [nn.Sequential(*(Block(member) for _ in range(2))) for member in group.members]
group.run(step)
"""


def test_compiled_with_graph_breaks_is_quiet_and_the_same() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=170)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
