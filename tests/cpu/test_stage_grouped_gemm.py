"""The GEMM stages alone, gate_up (a pair of weights) and down (one): exact where the sums are, else against float64."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, INTERMEDIATE_SIZES, filled, groups, identified, same_bits, segments
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import grouped_gemm

NAN = float("nan")
NUM_PAST = 5  # rows behind the last segment


def weights_of(num_experts: int, num_cols: int, num_k: int, is_pair: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Weights that say which expert, column and k they belong to, and gate and up apart."""
    gate, up = (
        torch.stack([identified(2 * expert + which, num_cols, num_k) for expert in range(num_experts)])
        for which in range(2)
    )
    return (gate, up) if is_pair else gate


def as_tuple(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def random_case(num_rows: list[int], num_cols: int, num_k: int, row_block: int = 128) -> tuple[Tensor, ...]:
    """rows (NaN in padding and behind), gate, up, segment_start, segment_num_rows."""
    counts = torch.tensor(num_rows, dtype=torch.int32)
    starts = torch.nn.functional.pad(((counts + row_block - 1) // row_block * row_block).cumsum(0), (1, 0)).int()
    rows = torch.randn(int(starts[-1]) + NUM_PAST, num_k).bfloat16()
    rows[~filled(starts, counts, len(rows))] = NAN
    gate, up = (torch.randn(2, len(num_rows), num_cols, num_k) * num_k**-0.5).bfloat16()
    return rows, gate, up, starts, counts


@hypothesis.given(
    row_block=st.sampled_from([128, 256]),
    is_pair=st.booleans(),
    widths=st.tuples(st.sampled_from(HIDDEN_SIZES[:3]), st.sampled_from(INTERMEDIATE_SIZES)),
    data=st.data(),
)
@hypothesis.settings(max_examples=60)
def test_every_row_meets_its_experts_weights(
    row_block: int, is_pair: bool, widths: tuple[int, int], data: st.DataObject
) -> None:
    # A row picks one k: what comes out is a column of the weights, bit for bit, and says where it stood.
    num_k, num_cols = widths if is_pair else widths[::-1]
    starts, counts = data.draw(segments(row_block))
    rows = torch.full((int(starts[-1]) + NUM_PAST, num_k), NAN).bfloat16()
    is_filled = filled(starts, counts, len(rows))
    chosen = (torch.arange(len(rows)) * 37 + 11) % num_k
    rows[is_filled] = torch.nn.functional.one_hot(chosen, num_k).bfloat16()[is_filled]
    weights = weights_of(len(counts), num_cols, num_k, is_pair)

    out = as_tuple(
        grouped_gemm.launch(rows, weights, starts, counts, row_block=row_block, group=data.draw(groups(1)))  # type: ignore[call-overload]
    )
    for have, weight in zip(out, as_tuple(weights), strict=True):
        want = torch.zeros(len(rows), num_cols, dtype=torch.bfloat16)
        for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
            want[start : start + count] = weight[expert].T[chosen[start : start + count]]
        assert same_bits(have, want)
    for have, want in zip(out, as_tuple(grouped_gemm.reference(rows, weights, starts, counts)), strict=True):  # type: ignore[call-overload]
        assert same_bits(have, want)


@pytest.mark.parametrize("num_k", [*HIDDEN_SIZES, *INTERMEDIATE_SIZES])
def test_integers_sum_exactly(num_k: int) -> None:
    # Every product and partial sum is an integer below 2^24, so all orders agree, and only the end rounds.
    starts, counts = torch.tensor([0, 128, 128, 384]), torch.tensor([77, 0, 200])
    row, k = torch.arange(389)[:, None], torch.arange(num_k)
    rows = ((row * 5 + k * 3) % 17 - 8).bfloat16()
    rows[~filled(starts, counts, len(rows))] = NAN
    weight = torch.stack([((torch.arange(192)[:, None] * 7 + k * 11 + e) % 31 - 15) for e in range(3)]).bfloat16()
    want = grouped_gemm.reference(rows.double(), weight.double(), starts, counts).bfloat16()
    assert want.abs().max() > 256
    assert same_bits(grouped_gemm.launch(rows, weight, starts, counts), want)
    gate, up = grouped_gemm.launch(rows, (weight, -weight), starts, counts)
    assert same_bits(gate, want)
    assert torch.equal(up, -want)


@pytest.mark.parametrize("is_pair", [True, False])
@pytest.mark.parametrize(("hidden_size", "width"), [(192, 640), (768, 64), (2880, 64), (2880, 640)])
def test_error_is_that_of_torch(hidden_size: int, width: int, is_pair: bool) -> None:
    num_k, num_cols = (hidden_size, width) if is_pair else (width, hidden_size)
    rows, gate, up, starts, counts = random_case([60, 0, 135, 1], num_cols, num_k)
    weights = (gate, up) if is_pair else gate
    out = as_tuple(grouped_gemm.launch(rows, weights, starts, counts))  # type: ignore[call-overload]
    is_filled = filled(starts, counts, len(rows))
    for have, weight in zip(out, as_tuple(weights), strict=True):
        exact = grouped_gemm.reference(rows.double(), weight.double(), starts, counts)
        assert not have[~is_filled].view(torch.int16).any()
        # One rounding to bfloat16, and float32 sums below it.
        bound = exact.abs() * 2.0**-8 + num_k * 2.0**-24 * (rows.double().abs().nan_to_num().sum(1, keepdim=True))
        assert ((have.double() - exact).abs() <= bound)[is_filled].all()
        by_torch = torch.zeros_like(have)
        for start, count, one in zip(starts.tolist(), counts.tolist(), weight, strict=False):
            by_torch[start : start + count] = rows[start : start + count] @ one.T
        ratio = (have.double() - exact).norm() / (by_torch.double() - exact).norm()
        assert ratio <= 1.5


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    rows, gate, _, starts, counts = random_case([250, 128], 128, 640)
    whole = grouped_gemm.launch(rows, gate, starts, counts)
    for at in (0, 5, 6, 127, 128, 249, 256, 383):
        expert = int(at >= 256)
        alone = torch.zeros(128, 640).bfloat16()
        alone[0] = rows[at]
        one = grouped_gemm.launch(alone, gate[expert : expert + 1], torch.tensor([0, 128]), torch.tensor([1]))
        assert same_bits(one[0], whole[at])


def test_both_row_blocks_and_all_workers_give_the_same_bits() -> None:
    rows, gate, up, starts, counts = random_case([250, 0, 3], 192, 768, row_block=256)
    want = grouped_gemm.launch(rows, (gate, up), starts, counts, row_block=256)
    is_filled = filled(starts, counts, len(rows))
    packed, _, _, other_starts, _ = random_case([250, 0, 3], 192, 768, row_block=128)
    is_filled_there = filled(other_starts, counts, len(packed))
    packed[is_filled_there] = rows[is_filled]
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=5)
        have = grouped_gemm.launch(rows, (gate, up), starts, counts, row_block=256, group=group)
        assert same_bits(have[0], want[0]) and same_bits(have[1], want[1])
        have = grouped_gemm.launch(packed, (gate, up), other_starts, counts, row_block=128, group=group)
        assert same_bits(have[0][is_filled_there], want[0][is_filled])
        assert same_bits(have[1][is_filled_there], want[1][is_filled])


def test_nan_and_inf_stay_in_their_row_and_column() -> None:
    rows, gate, _, starts, counts = random_case([9], 128, 192)
    clean = grouped_gemm.launch(rows, gate, starts, counts)
    rows[4, 7], rows[5, 8] = NAN, float("inf")
    gate[0, 33, 3] = NAN
    out = grouped_gemm.launch(rows, gate, starts, counts)
    assert out[4].isnan().all() and out[:9, 33].isnan().all()
    inf = torch.tensor(float("inf")) * gate[0, :, 8].float().sign()
    assert torch.equal(out[5, :33], inf[:33].bfloat16()) and torch.equal(out[5, 34:], inf[34:].bfloat16())
    out[:9, 33], out[4], out[5] = clean[:9, 33], clean[4], clean[5]
    assert same_bits(out, clean)


def test_no_rows_and_views() -> None:
    none = grouped_gemm.launch(
        torch.zeros(0, 64).bfloat16(), torch.zeros(2, 128, 64).bfloat16(), torch.tensor([0, 0, 0]), torch.tensor([0, 0])
    )
    assert none.shape == (0, 128)
    rows, gate, up, starts, counts = random_case([100], 192, 64)
    views = [t.mT.contiguous().mT for t in (rows, gate, up)]
    assert not any(view.is_contiguous() for view in views)
    have = grouped_gemm.launch(views[0], (views[1], views[2]), starts, counts)
    want = grouped_gemm.launch(rows, (gate, up), starts, counts)
    assert same_bits(have[0], want[0]) and same_bits(have[1], want[1])


def test_what_is_wrong_is_named() -> None:
    rows, gate, up, starts, counts = random_case([100, 30], 192, 64)
    with pytest.raises(TypeError, match=r"rows must be torch\.bfloat16 for the kernel, got torch\.float32"):
        grouped_gemm.launch(rows.float(), gate.float(), starts, counts)
    with pytest.raises(ValueError, match="N must be a positive multiple of 64 for the kernel, got 100"):
        grouped_gemm.launch(rows, gate[:, :100], starts, counts)
    with pytest.raises(ValueError, match="Kdim must be a positive multiple of 64 for the kernel, got 60"):
        grouped_gemm.launch(rows[:, :60], gate[:, :, :60], starts, counts)
    with pytest.raises(
        ValueError, match=r"segment_start must be \[0, 256, 512\] .* row_block=256, got \[0, 128, 256\]"
    ):
        grouped_gemm.launch(rows, gate, starts, counts, row_block=256)
    with pytest.raises(ValueError, match=r"segment_start must be \[0, 128, 128\] .*, got \[0, 128, 256\]"):
        grouped_gemm.launch(rows, gate, starts, torch.tensor([100, 0]))
    with pytest.raises(ValueError, match="pair"):
        grouped_gemm.launch(rows, (gate, up[:, :64]), starts, counts)
    with pytest.raises(ValueError, match="segments must"):
        grouped_gemm.launch(rows, gate, starts, counts + 100)
