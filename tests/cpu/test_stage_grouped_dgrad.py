"""The grouped_dgrad stages alone, down_dgrad and gate_up_dgrad: within one bfloat16 of float64, padding zero."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import filled, groups, same_bits, segments
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import grouped_dgrad, grouped_gemm


@hypothesis.given(
    is_pair=st.booleans(),
    num_k=st.sampled_from([64, 192, 320]),
    num_cols=st.sampled_from([64, 128, 448]),
    row_block=st.sampled_from([128, 256]),
    data=st.data(),
)
@hypothesis.settings(max_examples=40)
def test_products(is_pair: bool, num_k: int, num_cols: int, row_block: int, data: st.DataObject) -> None:
    starts, counts = data.draw(segments(row_block, max_experts=3))
    num_rows = int(starts[-1]) + 64
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = tuple(torch.randn(num_rows, num_k, generator=generator).bfloat16() for _ in range(1 + is_pair))
    weights = tuple(torch.randn(len(counts), num_k, num_cols, generator=generator).bfloat16() for _ in rows)
    is_filled = filled(starts, counts, num_rows)
    for each in rows:
        each[~is_filled] = float("nan")
    arguments = (rows, weights) if is_pair else (rows[0], weights[0])
    out = grouped_dgrad.launch(*arguments, starts, counts, row_block=row_block, group=data.draw(groups(1)))
    reference = grouped_dgrad.reference(*arguments, starts, counts)
    doubled = [tuple(t.double() for t in each) if is_pair else each[0].double() for each in (rows, weights)]
    exact = grouped_dgrad.reference(*doubled, starts, counts)
    for given in (out, reference):
        assert given.dtype == torch.bfloat16
        assert not given[~is_filled].view(torch.int16).any()
        distance = (given.double() - exact)[is_filled].abs()
        assert bool((distance <= exact[is_filled].abs() * 2.0**-8 + 1e-4).all())


def test_it_is_the_forwards_product_turned() -> None:
    """d_h of y = h W^T by autograd in float64."""
    starts, counts = torch.tensor([0, 128, 384]), torch.tensor([100, 129])
    h = torch.randn(384, 192, dtype=torch.float64, requires_grad=True)
    weight, d_y = torch.randn(2, 64, 192).double(), torch.randn(384, 64).double()
    (d_h,) = torch.autograd.grad(grouped_gemm.reference(h, weight, starts, counts), h, d_y)
    torch.testing.assert_close(grouped_dgrad.reference(d_y, weight, starts, counts), d_h)


def test_a_pair_is_one_sum() -> None:
    """Two products that cancel leave what one rounding leaves, nothing."""
    starts, counts = torch.tensor([0, 128]), torch.tensor([70])
    rows, weight = torch.randn(128, 64).bfloat16(), torch.randn(1, 64, 128).bfloat16()
    one = grouped_dgrad.launch(rows, weight, starts, counts)
    both = grouped_dgrad.launch((rows, rows), (weight, torch.zeros_like(weight)), starts, counts)
    assert same_bits(one, both)
    assert grouped_dgrad.launch((rows, -rows), (weight, weight), starts, counts).abs().max() < 1e-4


def test_workers_and_executors() -> None:
    starts, counts = torch.tensor([0, 256, 512]), torch.tensor([199, 256])
    rows: Tensor = torch.randn(512, 192).bfloat16()
    weight = torch.randn(2, 192, 320).bfloat16()
    want = grouped_dgrad.launch(rows, weight, starts, counts)
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        assert same_bits(grouped_dgrad.launch(rows, weight, starts, counts, group=group), want)


def test_what_is_wrong_is_named() -> None:
    starts, counts = torch.tensor([0, 128]), torch.tensor([5])
    rows, weight = torch.zeros(128, 64).bfloat16(), torch.zeros(1, 64, 128).bfloat16()
    with pytest.raises(ValueError, match=r"both be one tensor .* or both a pair .* not 2 and 1"):
        grouped_dgrad.reference((rows, rows), weight, starts, counts)
    with pytest.raises(ValueError, match=r"\[num_rows, Kdim\] and weight \[El, Kdim, N\]"):
        grouped_dgrad.reference(rows, weight.mT, starts, counts)
    with pytest.raises(TypeError, match="weight has dtype"):
        grouped_dgrad.reference(rows, weight.float(), starts, counts)
    with pytest.raises(ValueError, match="both rows must have one shape"):
        grouped_dgrad.reference((rows, rows[:64]), (weight, weight), starts, counts)
    with pytest.raises(ValueError, match="segments must start at 0"):
        grouped_dgrad.reference(rows, weight, starts, torch.tensor([129]))
    with pytest.raises(TypeError, match=r"rows must be torch\.bfloat16 for the kernel"):
        grouped_dgrad.launch(rows.float(), weight.float(), starts, counts)
    with pytest.raises(ValueError, match="N must be a positive multiple of 64"):
        grouped_dgrad.launch(rows, weight[:, :, :96], starts, counts)
