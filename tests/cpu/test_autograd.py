"""MoE in a training step: autograd, several calls in flight, checkpointing, shared workspaces, main_grads.

Every way of training must give the very bits of the plain one, which is right against float64.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    SMALL_RING,
    assert_gradients_right,
    assert_same,
    make_layer,
    make_workload,
    resident_bytes,
    same_bits,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok_modular import LocalGroup, MoE, MoKConfig, MoKPeerError, MoKTimeoutError
from mok_modular.testing import Workload

CONFIG = MoKConfig(mode="split", **SMALL_RING)
WEIGHTS = ("w_routed_gate", "w_routed_up", "w_routed_down", "w_shared_gate", "w_shared_up", "w_shared_down")


class Step:
    """One rank's layer and inputs that ask for gradients."""

    def __init__(self, workload: Workload, member: Any, config: MoKConfig = CONFIG, **options: Any) -> None:
        rank = member.rank()
        self.workload = workload
        self.layer = make_layer(workload, member, config, **options)
        self.x = workload.x[rank].clone().requires_grad_()
        self.ids = workload.expert_ids[rank]
        self.router_weights = workload.router_weights[rank].clone().requires_grad_()
        self.d_output = workload.d_outputs()[rank]

    def forward(self) -> Tensor:
        return self.layer(self.x, self.ids, self.router_weights)

    def gradients(self) -> dict[str, Tensor]:
        """What has been accumulated so far, by name; absent ones are left out."""
        tensors = {"x": self.x, "router_weights": self.router_weights}
        tensors |= {name: getattr(self.layer, name) for name in WEIGHTS}
        return {name: t.grad.clone() for name, t in tensors.items() if t is not None and t.grad is not None}

    def clear(self) -> None:
        self.x.grad = self.router_weights.grad = None
        self.layer.zero_grad()


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload([150, 0, 3, 120], K=3, seed=2)


def on_ranks(workload: Workload, fn: Callable[[Step], Any], **options: Any) -> list[Any]:
    return LocalGroup(workload.num_ranks).run(lambda member: fn(Step(workload, member, **options)))


def plain(step: Step) -> dict[str, Tensor]:
    output = step.forward()
    output.backward(step.d_output)
    return {"output": output.detach(), **step.gradients()}


@pytest.fixture(scope="module")
def expected(workload: Workload) -> list[dict[str, Tensor]]:
    """By rank: output and gradients of one plain step, which are right."""
    results = on_ranks(workload, plain)
    assert_gradients_right(workload, results)
    return results


@pytest.mark.parametrize("mode", ["fused", "split", "dispatch+gate_up|swiglu+down|combine"])
def test_every_plan_trains(workload: Workload, expected: list[dict[str, Tensor]], mode: str) -> None:
    results = on_ranks(workload, plain, config=MoKConfig(mode=mode, **SMALL_RING))
    for given, wanted in zip(results, expected, strict=True):
        assert_same(given, wanted)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_mxfp8(use_reentrant: bool | None) -> None:
    """Against the reference with the same quantization points; the same bits in another plan, and with a checkpoint."""
    workload = dataclasses.replace(make_workload([150, 60], H=128, S=128, K=3), precision="mxfp8")
    expected = on_ranks(workload, plain)
    assert_gradients_right(workload, expected)

    def step(part: Step) -> dict[str, Tensor]:
        if use_reentrant is None:
            return plain(part)
        output = checkpoint(part.layer, part.x, part.ids, part.router_weights, use_reentrant=use_reentrant)
        output.backward(part.d_output)
        return {"output": output.detach(), **part.gradients()}

    for given, wanted in zip(on_ranks(workload, step, config=MoKConfig(**SMALL_RING)), expected, strict=True):
        assert_same(given, wanted)
    in_bf16 = on_ranks(dataclasses.replace(workload, precision="bf16"), plain)
    for given, other in zip(expected, in_bf16, strict=True):
        for name in WEIGHTS[:3]:
            cosine = torch.cosine_similarity(given[name].double().flatten(), other[name].double().flatten(), dim=0)
            assert 0.99 < cosine < 1, name


def test_a_layer_without_a_shared_expert() -> None:
    workload = make_workload([70, 9], S=0)
    assert_gradients_right(workload, on_ranks(workload, plain))


def test_micro_batches_in_flight() -> None:
    """F F B B, F B F B and the other order of backwards: what is accumulated is the same sum in the same order."""
    first, second = make_workload([90, 20], seed=1), make_workload([33, 90], seed=2)
    alone = [on_ranks(w, plain) for w in (first, second)]

    def step(member: Any) -> list[dict[str, Tensor]]:
        layer = make_layer(first, member, CONFIG)
        parts = [Step(w, member) for w in (first, second)]
        for part in parts:
            part.layer = layer
        results = []
        for order in ((0, 1), (1, 0)):
            outputs = [part.forward() for part in parts]
            for i in order:
                layer.zero_grad()
                outputs[i].backward(parts[i].d_output)
                results.append({"output": outputs[i].detach(), **parts[i].gradients()})
                parts[i].clear()
        return results

    # The second workload's tokens meet the first one's weights here.
    mixed = Workload(second.shape, second.x, second.expert_ids, second.router_weights, first.weights)
    alone[1] = on_ranks(mixed, plain)
    for rank, results in enumerate(LocalGroup(2).run(step)):
        for result, i in zip(results, (0, 1, 1, 0), strict=True):
            assert_same(result, alone[i][rank])


def test_gradients_accumulate(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    def step(part: Step) -> dict[str, Tensor]:
        for _ in range(2):
            part.forward().backward(part.d_output)
        return part.gradients()

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        doubled = {name: tensor + tensor for name, tensor in wanted.items()}
        assert_same(given, doubled, without=("output",))


def test_a_graph_serves_two_backwards(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    """retain_graph: the context is not consumed, and another call between does not touch it."""

    def step(part: Step) -> list[dict[str, Tensor]]:
        output = part.forward()
        results = []
        for is_kept in (True, True, False):
            output.backward(part.d_output, retain_graph=is_kept)
            results.append({"output": output.detach(), **part.gradients()})
            part.clear()
            with torch.no_grad():
                part.layer(-part.x, part.ids, part.router_weights)
        return results

    for results, wanted in zip(on_ranks(workload, step), expected, strict=True):
        for given in results:
            assert_same(given, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(workload: Workload, expected: list[dict[str, Tensor]], use_reentrant: bool) -> None:
    """The forward runs again inside the backward, on every rank alike."""

    def step(part: Step) -> dict[str, Tensor]:
        output = checkpoint(part.layer, part.x, part.ids, part.router_weights, use_reentrant=use_reentrant)
        output.backward(part.d_output)
        return {"output": output.detach(), **part.gradients()}

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_in_a_row(use_reentrant: bool) -> None:
    workload = make_workload([40, 25])

    def step(part: Step, is_checkpointed: bool) -> dict[str, Tensor]:
        x = part.x
        for _ in range(3):
            if is_checkpointed:
                x = checkpoint(part.layer, x, part.ids, part.router_weights, use_reentrant=use_reentrant)
            else:
                x = part.layer(x, part.ids, part.router_weights)
        x.backward(part.d_output)
        return part.gradients()

    kept = on_ranks(workload, lambda part: step(part, False))
    for given, wanted in zip(on_ranks(workload, lambda part: step(part, True)), kept, strict=True):
        assert_same(given, wanted)


def test_two_layers_on_one_workspace() -> None:
    """Other widths, other numbers of experts; forwards first, then backwards in either order."""
    first, second = make_workload([90, 20]), make_workload([20, 90], E=20, I=320, S=64, seed=5)
    alone = [on_ranks(w, plain) for w in (first, second)]

    def step(member: Any, order: tuple[int, int]) -> list[dict[str, Tensor]]:
        parts = [Step(w, member, num_local_tokens=90) for w in (first, second)]
        assert parts[0].layer.workspace is parts[1].layer.workspace
        outputs = [part.forward() for part in parts]
        for i in order:
            outputs[i].backward(parts[i].d_output)
        return [{"output": o.detach(), **part.gradients()} for o, part in zip(outputs, parts, strict=True)]

    for order in ((1, 0), (0, 1)):
        for rank, results in enumerate(LocalGroup(2).run(lambda member, order=order: step(member, order))):
            for given, wanted in zip(results, alone, strict=True):
                assert_same(given, wanted[rank])


def test_two_workspaces() -> None:
    first, second = make_workload([50, 20]), make_workload([20, 50], H=128, seed=5)
    alone = [on_ranks(w, plain) for w in (first, second)]

    def step(member: Any) -> list[dict[str, Tensor]]:
        parts = [Step(w, member) for w in (first, second)]
        outputs = [part.forward() for part in parts]
        assert parts[0].layer.workspace is not parts[1].layer.workspace
        for part, output in zip(parts, outputs, strict=True):
            output.backward(part.d_output)
        return [{"output": o.detach(), **part.gradients()} for o, part in zip(outputs, parts, strict=True)]

    for rank, results in enumerate(LocalGroup(2).run(step)):
        for given, wanted in zip(results, alone, strict=True):
            assert_same(given, wanted[rank])


def test_the_workspace_may_grow_between_forward_and_backward() -> None:
    workload = make_workload([60, 20])
    alone = on_ranks(workload, plain)

    def step(part: Step) -> dict[str, Tensor]:
        output = part.forward()
        part.layer.workspace.grow(200)
        output.backward(part.d_output)
        return {"output": output.detach(), **part.gradients()}

    for given, wanted in zip(on_ranks(workload, step), alone, strict=True):
        assert_same(given, wanted)


def test_backward_uses_the_schedule_of_its_forward(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    """Also when the caller's ids have changed since, and other schedules were built."""

    def step(part: Step) -> dict[str, Tensor]:
        ids = part.ids.clone()
        output = part.layer(part.x, ids, part.router_weights)
        ids.copy_(ids.roll(1, 0))
        with torch.no_grad():
            part.layer(part.x, ids, part.router_weights)
        output.backward(part.d_output)
        return {"output": output.detach(), **part.gradients()}

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted)


@pytest.mark.parametrize("frozen", ["x", "router_weights", "weights", "shared"])
def test_what_requires_no_gradient_gets_none(
    workload: Workload, expected: list[dict[str, Tensor]], frozen: str
) -> None:
    names = {"weights": WEIGHTS, "shared": WEIGHTS[3:]}.get(frozen, (frozen,))

    def step(part: Step) -> dict[str, Tensor]:
        for name in names:
            getattr(part.layer if name in WEIGHTS else part, name).requires_grad_(False)
        return plain(part)

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted, without=names)


def test_without_gradients_no_context_is_kept(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    seen: list[int] = []

    def step(part: Step) -> None:
        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        rank = part.layer.member.rank()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.no_grad():
                assert same_bits(part.forward(), expected[rank]["output"])
            part.layer.requires_grad_(False)
            output = part.layer(part.x.detach(), part.ids, part.router_weights.detach())
        assert same_bits(output, expected[rank]["output"])
        assert not output.requires_grad

    on_ranks(workload, step)
    assert not seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grads(workload: Workload, expected: list[dict[str, Tensor]], dtype: torch.dtype) -> None:
    """The weight gradients are added there, and no .grad appears."""

    def step(part: Step) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        mains = {name: torch.full_like(p, 0.5, dtype=dtype) for name, p in part.layer.named_parameters()}
        part.layer.main_grads = mains
        output = part.forward()
        output.backward(part.d_output)
        return part.gradients(), mains

    for (given, mains), wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted, without=("output", *WEIGHTS))
        for name, main in mains.items():
            # wanted is rounded to bf16 before the addition, main is not.
            torch.testing.assert_close(main.float(), 0.5 + wanted[name].float(), rtol=2**-7, atol=2**-7)


def test_main_grads_must_stay_until_the_backward() -> None:
    def step(part: Step) -> None:
        part.layer.main_grads = {name: torch.zeros_like(p) for name, p in part.layer.named_parameters()}
        output = part.forward()
        part.layer.main_grads = None
        output.backward(part.d_output)

    with pytest.raises(RuntimeError, match="main_grads were set in the forward and are gone"):
        on_ranks(make_workload([5]), step)


def test_a_deleted_layer_still_has_its_backward(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    def step(part: Step) -> dict[str, Tensor]:
        output = part.forward()
        del part.layer
        output.backward(part.d_output)
        return {name: getattr(part, name).grad for name in ("x", "router_weights")}

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted, without=("output", *WEIGHTS))


def test_a_copied_layer_trains_on_its_own(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    def step(part: Step) -> dict[str, Tensor]:
        part.layer.main_grads = dict.fromkeys(WEIGHTS, torch.zeros(0))
        part.layer = copy.deepcopy(part.layer)
        assert part.layer.main_grads is None
        return plain(part)

    for given, wanted in zip(on_ranks(workload, step), expected, strict=True):
        assert_same(given, wanted)


def test_a_gradient_that_is_not_contiguous() -> None:
    """The gradient of a sum is one value, expanded; of a transposed product, a transposed tensor."""
    workload = make_workload([40, 10])

    def step(part: Step) -> tuple[Tensor, Tensor]:
        part.forward().sum().backward()
        summed = part.gradients()["x"]
        part.clear()
        part.forward().backward(torch.ones_like(part.d_output).t().contiguous().t())
        return summed, part.gradients()["x"]

    for summed, transposed in on_ranks(workload, step):
        assert same_bits(summed, transposed)
        assert summed.abs().sum() > 0


def test_forward_and_backward_in_runs_of_their_own(workload: Workload, expected: list[dict[str, Tensor]]) -> None:
    """The graph was made in another thread. Outside of a run the other ranks would not be there."""
    group = LocalGroup(workload.num_ranks, executor="threads")
    parts = group.run(lambda member: Step(workload, member))
    outputs = group.run(lambda member: parts[member.rank()].forward())
    with pytest.raises(RuntimeError, match="members of a group of 4 ranks work inside"):
        outputs[0].backward(parts[0].d_output, retain_graph=True)

    def backward(member: Any) -> None:
        outputs[member.rank()].backward(parts[member.rank()].d_output)

    group.run(backward)
    for part, output, wanted in zip(parts, outputs, expected, strict=True):
        assert_same({"output": output.detach(), **part.gradients()}, wanted)


def test_a_second_derivative_is_refused(workload: Workload) -> None:
    def step(part: Step) -> None:
        (d_x,) = torch.autograd.grad(part.forward().sum(), part.x, create_graph=True)
        d_x.sum().backward()

    with pytest.raises(NotImplementedError, match="a MoE layer has first derivatives only"):
        on_ranks(workload, step)


def test_ranks_that_make_another_number_of_backwards_are_told() -> None:
    workload = make_workload([20, 20])

    def step(part: Step) -> None:
        output = part.forward()
        if part.layer.member.rank() == 0:
            output.backward(part.d_output)

    with pytest.raises(MoKPeerError, match="rank 1 returned after"):
        on_ranks(workload, step)


@pytest.mark.parametrize("late", range(2))
def test_a_late_rank_changes_nothing(late: int) -> None:
    workload = make_workload([30, 20])

    def step(part: Step, is_late: bool) -> dict[str, Tensor]:
        output = part.forward()
        if is_late and part.layer.member.rank() == late:
            time.sleep(0.1)
        output.backward(part.d_output)
        return part.gradients()

    on_time = on_ranks(workload, lambda part: step(part, False))
    for given, wanted in zip(on_ranks(workload, lambda part: step(part, True)), on_time, strict=True):
        assert_same(given, wanted)


def test_a_rank_that_is_too_late_is_named() -> None:
    """And the next step of all ranks works."""
    workload = make_workload([30, 20])
    config = MoKConfig(**SMALL_RING, start_timeout_s=0.2)
    seen: dict[int, Exception] = {}

    def step(part: Step) -> dict[str, Tensor]:
        rank = part.layer.member.rank()
        plain(part)
        part.clear()
        output = part.forward()
        if rank == 1:
            time.sleep(0.5)
        try:
            output.backward(part.d_output)
        except MoKTimeoutError as error:
            seen[rank] = error
        part.clear()
        time.sleep(0.1 if rank == 1 else 0.4)  # meet again
        part.layer.workspace.reset()
        return plain(part)

    results = on_ranks(workload, step, config=config)
    assert_gradients_right(workload, results)
    assert "backward: no call from rank 1 within start_timeout_s=0.2 s" in str(seen[0])
    assert set(seen) == {0, 1}


def test_two_hundred_steps_in_flat_memory() -> None:
    workload = make_workload([9, 3], E=4)

    def step(part: Step) -> list[int]:
        first = plain(part)
        sizes = []
        for n in range(200):
            part.clear()
            assert_same(plain(part), first)
            if n % 50 == 49:
                gc.collect()
                sizes.append(resident_bytes())
        return sizes

    sizes = on_ranks(workload, step)[0]
    assert sizes[-1] - sizes[0] < 8 * 2**20


def test_a_layer_is_freed_with_its_graph() -> None:
    workload = make_workload([5])

    def step(part: Step) -> list[Any]:
        output = part.forward()
        state = weakref.ref(part.layer._state)
        del part.layer
        gc.collect()
        assert state() is not None  # its backward may still come
        output.backward(part.d_output)
        del output
        gc.collect()
        return [state]

    ((state,),) = on_ranks(workload, step)
    assert state() is None


def test_an_optimizer_learns() -> None:
    """A few steps towards a target, on one rank and on two: the loss falls."""

    def train(member: Any) -> list[float]:
        torch.manual_seed(0)
        layer = MoE(64, 128, 4, 2, group=member, config=CONFIG)
        optimizer = torch.optim.SGD(layer.parameters(), lr=3.0)
        x, target = torch.randn(2, 48, 64).bfloat16()
        weights, ids = torch.randn(48, 4).softmax(-1).topk(2)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = (layer(x, ids, weights).float() - target.float()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    for num_ranks in (1, 2):
        for losses in LocalGroup(num_ranks).run(train):
            assert losses[-1] < 0.9 * losses[0]
            assert all(b < a for a, b in itertools.pairwise(losses))
