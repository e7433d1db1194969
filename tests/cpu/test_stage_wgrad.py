"""The wgrad stage alone: sums over rows within float32 of the exact ones, carries that go on to the same bits."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import filled, groups, same_bits, segments
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import wgrad


def operands(num_rows: int, height: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_rows, height, generator=generator).bfloat16(),
        torch.randn(num_rows, width, generator=generator).bfloat16(),
    )


@hypothesis.given(
    height=st.sampled_from([64, 192, 320]),
    width=st.sampled_from([64, 128, 448]),
    row_block=st.sampled_from([128, 256]),
    has_carry=st.booleans(),
    data=st.data(),
)
@hypothesis.settings(max_examples=40)
def test_sums(height: int, width: int, row_block: int, has_carry: bool, data: st.DataObject) -> None:
    starts, counts = data.draw(segments(row_block, max_experts=3))
    num_rows = int(starts[-1]) + 64
    left, right = operands(num_rows, height, width, data.draw(st.integers(0, 99)))
    is_filled = filled(starts, counts, num_rows)
    left[~is_filled] = right[~is_filled] = float("nan")
    carry = torch.zeros(len(counts), height, width) if has_carry else None
    if carry is not None and bool(counts.any()):
        carry[counts.nonzero()[0, 0]] = 30 * torch.randn(height, width)
    out = wgrad.launch(left, right, starts, counts, carry, row_block=row_block, group=data.draw(groups(1)))
    reference = wgrad.reference(left, right, starts, counts, carry)
    exact = wgrad.reference(left.double(), right.double(), starts, counts, None if carry is None else carry.double())
    for given in (out, reference):
        assert given.dtype == torch.float32
        assert not given[counts == 0].view(torch.int32).any()
        torch.testing.assert_close(given.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("row_block", [128, 256])
def test_a_carry_goes_on_to_the_same_bits(row_block: int) -> None:
    """The rows of an expert in one window, and in three."""
    num_rows = 3 * row_block
    left, right = operands(num_rows, 192, 320, seed=1)

    def window(begin: int, count: int, carry: Tensor | None) -> Tensor:
        rows = slice(begin, begin + -(-count // row_block) * row_block)
        starts, counts = torch.tensor([0, 0, rows.stop - rows.start]), torch.tensor([0, count])
        return wgrad.launch(left[rows], right[rows], starts, counts, carry, row_block=row_block)

    whole = window(0, num_rows - 5, None)
    carry: Tensor | None = None
    for i in range(3):
        carry = window(i * row_block, row_block - (5 if i == 2 else 0), carry)
    assert carry is not None
    assert same_bits(carry, whole)


def test_workers_and_executors() -> None:
    starts, counts = torch.tensor([0, 256, 512]), torch.tensor([199, 256])
    left, right = operands(512, 192, 320, seed=2)
    want = wgrad.launch(left, right, starts, counts)
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        assert same_bits(wgrad.launch(left, right, starts, counts, group=group), want)


def test_what_is_wrong_is_named() -> None:
    starts, counts = torch.tensor([0, 128, 256]), torch.tensor([5, 6])
    left, right = operands(256, 64, 128, seed=0)
    with pytest.raises(TypeError, match="right has dtype"):
        wgrad.reference(left, right.float(), starts, counts)
    with pytest.raises(ValueError, match="with the same rows"):
        wgrad.reference(left, right[:128], starts, counts)
    with pytest.raises(ValueError, match=r"carry must be \[El, M, N\] = \[2, 64, 128\], not \[2, 128, 64\]"):
        wgrad.reference(left, right, starts, counts, torch.zeros(2, 128, 64))
    with pytest.raises(TypeError, match=r"carry has dtype torch\.bfloat16; it must be torch\.float32"):
        wgrad.reference(left, right, starts, counts, torch.zeros(2, 64, 128).bfloat16())
    with pytest.raises(ValueError, match="segments must start at 0"):
        wgrad.reference(left, right, starts, torch.tensor([129, 0]))
    with pytest.raises(ValueError, match=r"only the first expert with rows can have a carry .* \[1\] are not"):
        carry = torch.zeros(2, 64, 128)
        carry[1] = 1
        wgrad.launch(left, right, starts, counts, carry)
    with pytest.raises(ValueError, match="M of left must be a positive multiple of 64"):
        wgrad.launch(left[:, :32], right, starts, counts)
    with pytest.raises(TypeError, match=r"left must be torch\.bfloat16 for the kernel"):
        wgrad.launch(left.float(), right.float(), starts, counts)
