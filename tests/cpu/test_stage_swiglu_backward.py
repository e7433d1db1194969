"""The swiglu_backward stage alone: against autograd in float64, h to the forward's bits, limits as torch.clamp's."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import INTERMEDIATE_SIZES, groups, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import swiglu, swiglu_backward

LIMITS = (None, 0.0, 0.5, 7.0)


def inputs(num_rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    d_hidden, gate, up = torch.randn(3, num_rows, width, generator=generator).bfloat16()
    return d_hidden, 3 * gate, up, torch.randn(num_rows, generator=generator)


@hypothesis.given(
    num_rows=st.integers(0, 300),
    width=st.sampled_from(INTERMEDIATE_SIZES),
    limit=st.sampled_from(LIMITS),
    data=st.data(),
)
@hypothesis.settings(max_examples=30)
def test_like_the_reference(num_rows: int, width: int, limit: float | None, data: st.DataObject) -> None:
    given = inputs(num_rows, width, data.draw(st.integers(0, 99)))
    launched = swiglu_backward.launch(*given, limit, group=data.draw(groups(1)))
    wanted = swiglu_backward.reference(*given, limit)
    for have, want in zip(launched, wanted, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
        # Nearly all bits; torch's sigmoid is another one.
        assert have.numel() == 0 or float((have != want).double().mean()) < 0.01
        torch.testing.assert_close(have.float(), want.float(), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("limit", LIMITS)
def test_gradients_are_autograds(limit: float | None) -> None:
    d_hidden, gate, up, weights = (tensor.double() for tensor in inputs(40, 64, seed=1))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    h = swiglu.reference(gate, up, limit)
    d_gate, d_up = torch.autograd.grad(h, (gate, up), d_hidden * weights[:, None])
    found = swiglu_backward.reference(d_hidden, gate.detach(), up.detach(), weights, limit)
    h = h.detach()
    torch.testing.assert_close(found[0], d_gate)
    torch.testing.assert_close(found[1], d_up)
    torch.testing.assert_close(found[2], weights[:, None] * h)
    torch.testing.assert_close(found[3].sum(1), (d_hidden * h).sum(1))


@pytest.mark.parametrize("limit", LIMITS)
def test_h_has_the_forwards_bits(limit: float | None) -> None:
    """Of every bfloat16 gate; with a weight of one w * h is h."""
    gate = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(1024, 64)
    up = torch.tensor([1.0, -0.3359375, 7.03125, 1e-30]).bfloat16().repeat(16).expand_as(gate).contiguous()
    one = torch.ones(len(gate))
    for module_name in ("launch", "reference"):
        h = getattr(swiglu, module_name)(gate, up, limit)
        found = getattr(swiglu_backward, module_name)(torch.ones_like(gate), gate, up, one, limit)[2]
        assert torch.equal(found.isnan(), h.isnan())
        assert same_bits(found.nan_to_num(), h.nan_to_num())


@pytest.mark.parametrize("which", ["reference", "launch"])
def test_gradients_at_and_beyond_a_limit(which: str) -> None:
    limit = 0.5
    gate = torch.tensor([0.5, 0.50390625, -9.0, float("nan")]).bfloat16().repeat(16)[None]
    up = torch.full_like(gate, 0.25)
    given = (torch.ones_like(gate), gate, up, torch.ones(1), limit)
    d_gate = getattr(swiglu_backward, which)(*given)[0][0, :4]
    assert (d_gate != 0).tolist() == [True, False, True, False]
    up = torch.tensor([0.5, -0.5, 0.50390625, -0.50390625]).bfloat16().repeat(16)[None]
    d_up = getattr(swiglu_backward, which)(torch.ones_like(gate), torch.ones_like(up), up, torch.ones(1), limit)[1]
    assert (d_up[0, :4] != 0).tolist() == [True, True, False, False]


def test_d_router_is_before_the_weight() -> None:
    d_hidden, gate, up, _ = inputs(5, 64, seed=3)
    ones = swiglu_backward.launch(d_hidden, gate, up, torch.ones(5))[3]
    odd = swiglu_backward.launch(d_hidden, gate, up, torch.tensor([0.0, -1.5, 1e-20, -1e-38, 3.0]))
    assert same_bits(odd[3], ones)
    assert not odd[0][0].any()


@pytest.mark.parametrize("which", ["reference", "launch"])
def test_rows_behind_the_last_come_out_as_zeros(which: str) -> None:
    given = [tensor.clone() for tensor in inputs(5, 64, seed=4)]
    for tensor in given:
        tensor[2:] = float("nan")
    for out in getattr(swiglu_backward, which)(*given, num_rows=torch.tensor(2)):
        assert out[:2].ne(0).all()
        assert out[2:].eq(0).all()


def test_workers_and_executors() -> None:
    given = inputs(300, 640, seed=5)
    want = swiglu_backward.launch(*given, 0.5)
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        for mine, theirs in zip(swiglu_backward.launch(*given, 0.5, group=group), want, strict=True):
            assert same_bits(mine, theirs)


def test_what_is_wrong_is_named() -> None:
    d_hidden, gate, up, weights = inputs(2, 64, seed=0)
    with pytest.raises(TypeError, match=r"d_hidden has dtype torch\.float32 but gate has torch\.bfloat16"):
        swiglu_backward.reference(d_hidden.float(), gate, up, weights)
    with pytest.raises(ValueError, match="one shape with I a multiple of 32"):
        swiglu_backward.reference(d_hidden, gate, up[:1], weights)
    with pytest.raises(TypeError, match=r"row_weights have dtype torch\.bfloat16"):
        swiglu_backward.reference(d_hidden, gate, up, weights.bfloat16())
    with pytest.raises(ValueError, match=r"row_weights must be \[rows\] = \[2\], not \(2, 1\)"):
        swiglu_backward.reference(d_hidden, gate, up, weights[:, None])
    with pytest.raises(ValueError, match="I of gate must be a positive multiple of 64"):
        swiglu_backward.launch(*(t[:, :32].contiguous() for t in (d_hidden, gate, up)), weights)
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="limit="):
            swiglu_backward.launch(d_hidden, gate, up, weights, limit)
