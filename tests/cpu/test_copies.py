"""What every rank has a copy of: compared in the first call, broadcast, and counted once when gradients are clipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mok_modular as mok
from mok_modular.calls.copies import fingerprint

SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")


class Model(nn.Module):
    """A router, whose weights every rank has a copy of, and a layer."""

    def __init__(self, member: mok.LocalMember, **options: Any) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.register_buffer("scale", torch.rand(1))
        self.moe = mok.MoE(64, 64, 8, 2, member, **{"shared_intermediate_size": 64, **options})

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x.float()).softmax(-1).topk(2)
        return self.moe(x, ids, weights)


def models(num_ranks: int, seed: Callable[[int], int] = lambda rank: 3, **options: Any) -> list[Model]:
    built = []
    for member in mok.LocalGroup(num_ranks).members:
        torch.manual_seed(seed(member.rank()))
        built.append(Model(member, **options))
    return built


def on_ranks(built: list[Model], fn: Callable[[Model], Any]) -> list[Any]:
    return built[0].moe.member.group.run(lambda member: fn(built[member.rank()]))


def tokens(rank: int, count: int = 30) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()


def by_rank(rank: int) -> int:
    return 1234 + rank


# ---- copies that differ ----


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_local_tokens", [None, 30])
def test_copies_that_differ_are_named_in_the_first_call(num_ranks: int, num_local_tokens: int | None) -> None:
    """Scripts that seed by rank: every rank raises, and goes on once the copies are the same."""
    built = models(num_ranks, by_rank, num_local_tokens=num_local_tokens)

    def step(model: Model) -> Tensor:
        with torch.no_grad():
            for _ in range(2):  # until it is mended
                with pytest.raises(ValueError) as caught:
                    model(tokens(0))
                for word in (*SHARED, f"w_shared_up on rank {', '.join(map(str, range(1, num_ranks)))}", "manual_seed"):
                    assert word in str(caught.value)
            mok.broadcast_copies(model)
            return model(tokens(0))  # the same tokens everywhere

    outputs = on_ranks(built, step)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(built[-1].moe.w_shared_down, built[0].moe.w_shared_down)


def test_only_the_copy_that_differs_is_named() -> None:
    built = models(4)
    with torch.no_grad():
        built[2].moe.w_shared_up[63, 63] += 1 / 64

    def step(model: Model) -> str:
        with pytest.raises(ValueError) as caught:
            model(tokens(model.moe.member.rank()))
        return str(caught.value)

    for text in on_ranks(built, step):
        assert "these differ from rank 0's: w_shared_up on rank 2. " in text


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equal_copies_are_compared_once(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built, asked = models(num_ranks), []
    group = built[0].moe.member.group
    meet = group.meet

    def listen(rank: int, name: str, *rest: Any, **options: Any) -> Any:
        asked.append(name)
        return meet(rank, name, *rest, **options)

    monkeypatch.setattr(group, "meet", listen)

    def step(model: Model) -> None:
        for _ in range(2):
            model(tokens(0)).sum().backward()
        twin = copy.deepcopy(model)  # a layer of its own
        twin(tokens(0))

    on_ranks(built, step)
    assert asked.count("compare_copies") == (0 if num_ranks == 1 else 2 * num_ranks)


def test_experts_of_ranks_that_seed_differently_are_fine() -> None:
    outputs = on_ranks(models(2, by_rank, shared_intermediate_size=0), lambda model: model.moe(*inputs(0)))
    assert torch.equal(*outputs)


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    return tokens(rank), torch.tensor([[0, 5]] * 30), torch.ones(30, 2)


def test_ranks_whose_shared_experts_have_other_sizes_are_told_so() -> None:
    group = mok.LocalGroup(2)
    layers = [mok.MoE(64, 64, 8, 2, m, shared_intermediate_size=64 * (1 + m.rank())) for m in group.members]
    with pytest.raises(mok.MoKPeerError, match="ranks differ in shared_size"):
        group.run(lambda member: layers[member.rank()](*inputs(0)))


def test_a_fingerprint_sees_every_bit_and_its_place() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = fingerprint(weight)
    assert torch.equal(fingerprint(weight.clone().t().contiguous().t()), plain)
    found = {plain.item()}
    for row, column in ((0, 0), (13, 77), (63, 127)):
        for bit in range(16):
            changed = weight.clone()
            changed.view(torch.int16)[row, column] ^= -(2**15) if bit == 15 else 1 << bit
            found.add(fingerprint(changed).item())
    found.add(fingerprint(weight.flip(0)).item())
    swapped = weight.clone()
    swapped[0, :2] = weight[0, :2].flip(0)
    found.add(fingerprint(swapped).item())
    assert len(found) == 1 + 48 + 2
    assert all(value < 2**63 for value in found)


def test_a_fingerprint_does_not_depend_on_how_it_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 128).bfloat16()
    plain = fingerprint(weight)
    monkeypatch.setattr("mok_modular.calls.copies.CHUNK", 100)
    assert torch.equal(fingerprint(weight), plain)


# ---- broadcast ----


def test_broadcast_gives_rank_0s_copies_and_leaves_experts_alone() -> None:
    built, before = models(4, by_rank), models(4, by_rank)
    on_ranks(built, lambda model: mok.broadcast_copies(model))
    for model, old in zip(built, before, strict=True):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            source = old if name.removeprefix("moe.") in ROUTED else before[0]
            assert torch.equal(tensor, dict([*source.named_parameters(), *source.named_buffers()])[name]), name


def test_broadcast_of_models_that_differ_is_refused() -> None:
    built = models(2)
    built[1].router = nn.Linear(64, 9)

    def step(model: Model) -> str:
        with pytest.raises(ValueError) as caught:
            mok.broadcast_copies(model)
        return str(caught.value)

    for text in on_ranks(built, step):
        assert "rank 1's differ from rank 0's: router.bias, router.weight" in text
    with pytest.raises(ValueError, match="must be a MoE layer or hold one, got a Linear"):
        mok.broadcast_copies(nn.Linear(2, 2))


# ---- clipping ----


def reduced(model: Model, num_tokens: int = 30) -> None:
    """A step's gradients, those of copies summed."""
    member = model.moe.member
    model(tokens(member.rank(), num_tokens)).float().square().sum().backward()
    member.all_reduce([p.grad for name, p in model.named_parameters() if name.removeprefix("moe.") not in ROUTED])


def all_gradients(built: list[Model]) -> Tensor:
    """Of the whole model, each once, float64."""
    parts = [p.grad for name, p in built[0].named_parameters() if name.removeprefix("moe.") not in ROUTED]
    parts += [getattr(model.moe, name).grad for model in built for name in ROUTED]
    return torch.cat([part.flatten().double() for part in parts])


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_norm_counts_experts_and_copies_once(num_ranks: int, norm_type: float) -> None:
    built = models(num_ranks)
    on_ranks(built, reduced)
    wanted = torch.linalg.vector_norm(all_gradients(built), norm_type)
    plain = [{name: p.grad.clone() for name, p in model.named_parameters()} for model in built]
    norms = on_ranks(built, lambda model: mok.clip_grad_norm_(model, 1.0, norm_type))
    assert wanted > 10
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0].double(), wanted, rtol=1e-6, atol=0)
    for model, before in zip(built, plain, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, before[name] * (1 / (norms[0] + 1e-6))), name
    for name in ("router.weight", "moe.w_shared_up"):
        assert all(torch.equal(m.get_parameter(name).grad, built[0].get_parameter(name).grad) for m in built)


def test_as_torch_does_on_one_rank() -> None:
    """For the same numbers; in float32, where torch sums norms of bf16 gradients in bf16."""
    (ours,), (theirs,) = models(1), models(1)
    for model in (ours, theirs):
        reduced(model)
    norm = mok.clip_grad_norm_(ours.parameters(), 0.5)
    wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    torch.testing.assert_close(norm, wanted.float(), rtol=1e-2, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=1e-6)


def test_small_gradients_stay() -> None:
    built = models(2)
    on_ranks(built, reduced)
    before = all_gradients(built)
    on_ranks(built, lambda model: mok.clip_grad_norm_(model, 1e9))
    assert torch.equal(all_gradients(built), before)


GIVEN: dict[str, tuple[Callable[[Model], Any], Callable[[str], bool]]] = {
    "generator": (lambda model: model.parameters(), lambda name: True),
    "some": (lambda model: [*model.moe.parameters(), model.router.bias], lambda name: name != "router.weight"),
    "layer": (lambda model: model.moe, lambda name: name.startswith("moe")),
    "tensor": (lambda model: model.moe.w_routed_up, lambda name: name == "moe.w_routed_up"),
}
"""What is given to clip_grad_norm_, and the names that it holds."""


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("is_copied", [False, True])
def test_parameters_are_known_whatever_holds_them(given: str, is_copied: bool) -> None:
    """Also those of a deep copy, which are other tensors."""
    built = models(2)
    if is_copied:
        originals, built = built, [copy.deepcopy(model) for model in built]
        assert originals[0].moe.w_routed_up is not built[0].moe.w_routed_up
    on_ranks(built, reduced)
    choose, is_held = GIVEN[given]
    norms = on_ranks(built, lambda model: mok.clip_grad_norm_(choose(model), 1e9))
    parts = [p.grad for name, p in built[0].named_parameters() if is_held(name)]
    parts += [p.grad for n, p in built[1].named_parameters() if is_held(n) and n.removeprefix("moe.") in ROUTED]
    wanted = torch.linalg.vector_norm(torch.cat([part.flatten().double() for part in parts]))
    torch.testing.assert_close(torch.stack(norms).double(), wanted.expand(2), rtol=1e-6, atol=0)


def test_main_grads_are_a_layers_gradients() -> None:
    built, mains = models(2), []
    for model in built:
        mains.append({name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.moe.named_parameters()})
        model.moe.main_grads = mains[-1]

    def step(model: Model) -> Tensor:
        member = model.moe.member
        model(tokens(member.rank())).float().square().sum().backward()
        assert model.moe.w_shared_up.grad is None
        shared = [mains[member.rank()][name] for name in SHARED]
        member.all_reduce([*shared, model.router.weight.grad, model.router.bias.grad])
        return mok.clip_grad_norm_(model, 1.0)

    norms = on_ranks(built, step)
    parts = [built[0].router.weight.grad, built[0].router.bias.grad, *(mains[0][name] for name in SHARED)]
    parts += [main[name] for main in mains for name in ROUTED]
    after = torch.linalg.vector_norm(torch.cat([part.flatten().double() for part in parts]))
    assert torch.equal(*norms)
    assert norms[0] > 10
    assert after.item() == pytest.approx(1.0, rel=1e-6)


def test_gradients_of_copies_that_were_not_summed_are_named() -> None:
    built = models(4)

    def step(model: Model) -> str:
        reduced(model)
        if model.moe.member.rank() == 2:
            model.moe.w_shared_up.grad *= 1.01
            model.router.bias.grad = None
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with pytest.raises(ValueError) as caught:
            mok.clip_grad_norm_(model, 1.0)
        for p, old in zip(model.parameters(), before, strict=True):
            assert p.grad is old is None or torch.equal(p.grad, old)
        return str(caught.value)

    for text in on_ranks(built, step):
        assert "have a copy" not in text
        assert "but their gradients differ: router.bias, moe.w_shared_up. Sum them" in text


def test_without_any_gradient() -> None:
    assert on_ranks(models(2), lambda model: mok.clip_grad_norm_(model, 1.0).item()) == [0.0, 0.0]


def test_no_finite_norm() -> None:
    """One rank's expert overflows: every rank hears of it."""
    built = models(2)
    on_ranks(built, reduced)
    built[1].moe.w_routed_up.grad[0, 0, 0] = math.inf

    def step(model: Model) -> Tensor:
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* is non-finite"):
            mok.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert model.router.weight.grad.isfinite().all()
        return mok.clip_grad_norm_(model, 1.0)

    assert [norm.item() for norm in on_ranks(built, step)] == [math.inf, math.inf]
    assert all(model.router.weight.grad.abs().sum() == 0 for model in built)


def test_wrong_arguments_to_clip() -> None:
    (model,) = models(1)
    with pytest.raises(ValueError, match=r"norm_type must be above 0, got 0\.0"):
        mok.clip_grad_norm_(model, 1.0, 0)
    with pytest.raises(ValueError, match="must be a MoE layer or hold one, got a Linear"):
        mok.clip_grad_norm_(nn.Linear(2, 2), 1.0)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"must hold parameters of a MoE layer, got none .* pass the model"):
        mok.clip_grad_norm_(masters, 1.0)
    (other,) = models(1)
    with pytest.raises(ValueError, match="layers of several"):
        mok.clip_grad_norm_([model.moe.w_routed_up, other.moe.w_routed_up], 1.0)
    built = models(2)
    with pytest.raises(ValueError, match="the same number of copies, got rank 0: 5, rank 1: 3"):
        on_ranks(built, lambda m: mok.clip_grad_norm_(m if m.moe.member.rank() == 0 else m.moe, 1.0))
