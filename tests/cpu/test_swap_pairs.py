"""A stage of the forward that is swapped without what differentiates it: the first backward warns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mok_modular as mok
from mok_modular import stages
from mok_modular.protocol.swap_rules import BACKWARD_OF
from mok_modular.testing.capture import capture


def act(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None, *, num_rows: Any = None) -> Tensor:
    return act(gate.float(), up.float()).bfloat16()


def swiglu_backward(
    d_h: Tensor, gate: Tensor, up: Tensor, weights: Tensor, limit: float | None = None, *, num_rows: Any = None
) -> tuple[Tensor, ...]:
    g, u, d = gate.float(), up.float(), d_h.float() * weights[:, None]
    sigmoid = torch.sigmoid(1.702 * g)
    d_gate = d * (u + 1) * sigmoid * (1 + 1.702 * g * (1 - sigmoid))
    d_up = d * g * sigmoid
    hidden = act(g, u)
    partials = (d_h.float() * hidden).unflatten(1, (-1, 32)).sum(-1)
    return d_gate.bfloat16(), d_up.bfloat16(), (weights[:, None] * hidden).bfloat16(), partials


def as_own(name: str) -> Callable[..., Any]:
    """The reference, as a function that somebody else has written."""

    def f(*args: Any, **kwargs: Any) -> Any:
        return getattr(stages, name).reference(*args, **kwargs)

    return f


def backwards(given: dict[str, Callable[..., Any]], num_ranks: int = 1, num_backwards: int = 1) -> list[str]:
    """What forwards and backwards of a layer warn of. The gradient of x is right where `act` is swapped in both."""

    def step(member: Any) -> float:
        torch.manual_seed(0)
        config = mok.MoKConfig(mode="split", stages=given)
        layer = mok.MoE(64, 64, num_ranks, 1, member, config=config)
        x = torch.randn(20, 64).bfloat16().requires_grad_()
        ids = torch.full((20, 1), member.rank())
        for _ in range(num_backwards):
            x.grad = None
            layer(x, ids, torch.ones(20, 1)).float().sum().backward()
        g, u, d = (p[0].detach().double() for p in layer.parameters())
        true = x.detach().double().requires_grad_()
        (act(true @ g.T, true @ u.T) @ d.T).sum().backward()
        assert x.grad is not None
        assert true.grad is not None
        return float((x.grad.double() - true.grad).norm() / true.grad.norm())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = mok.LocalGroup(num_ranks).run(step)
    if given.get("swiglu") is swiglu and "swiglu_backward" in given:
        assert max(errors) < 0.01
    return [str(each.message) for each in caught if "is swapped" in str(each.message)]


def test_another_activation_without_its_derivative() -> None:
    (text,) = backwards({"swiglu": swiglu}, num_ranks=2, num_backwards=3)
    assert text.startswith("stages['swiglu'] is swapped and swiglu_backward not: ")
    assert "check_stage('swiglu', f)" in text
    assert backwards({"swiglu": swiglu, "swiglu_backward": swiglu_backward}) == []


@pytest.mark.parametrize("name", list(BACKWARD_OF))
def test_every_pair(name: str) -> None:
    partners = BACKWARD_OF[name]
    (text,) = backwards({name: as_own(name)})
    assert text.startswith(f"stages[{name!r}] is swapped and {' and '.join(partners)} not: ")
    if len(partners) > 1:
        (text,) = backwards({name: as_own(name), partners[0]: as_own(partners[0])})
        assert text.startswith(f"stages[{name!r}] is swapped and {partners[1]} not: ")
    assert backwards({each: as_own(each) for each in (name, *partners)}) == []


def test_what_computes_the_same_is_not_warned_of(tmp_path: Any) -> None:
    wrapped = functools.wraps(stages.dispatch.reference)(as_own("dispatch"))
    given = {"swiglu": capture("swiglu", tmp_path / "swiglu.pt"), "dispatch": wrapped}
    assert backwards({**given, "grouped_gemm": stages.grouped_gemm.reference, "reduce": as_own("reduce")}) == []
    assert backwards({"wgrad": as_own("wgrad")}) == []


def test_a_forward_alone_is_not_warned_of() -> None:
    config = mok.MoKConfig(mode="split", stages={"swiglu": swiglu})
    layer = mok.MoE(64, 64, 1, 1, mok.LocalGroup(1), config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            layer(torch.zeros(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_a_warning_that_is_an_error_is_one_on_every_rank() -> None:
    """And nothing has run: the next backward works."""
    config = mok.MoKConfig(mode="split", stages={"swiglu": swiglu})

    def step(member: Any) -> None:
        layer = mok.MoE(64, 64, 2, 1, member, config=config)
        x = torch.zeros(3, 64).bfloat16().requires_grad_()
        out = layer(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        with pytest.raises(UserWarning, match="swiglu_backward not"):
            out.sum().backward(retain_graph=True)
        member.all_reduce([])
        if member.rank() == 0:
            warnings.simplefilter("ignore")
        member.all_reduce([])
        out.sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mok.LocalGroup(2).run(step)
