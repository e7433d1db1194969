"""The reduce stage alone: bit for bit the chain of fused multiply-adds, missing routes never read."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, TOPKS, groups, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import reduce

NAN = float("nan")


def inputs(
    num_tokens: int, topk: int, hidden_size: int, seed: int, missing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """combined (NaN where nothing came), router weights (NaN there too), mask and the shared expert's rows."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_tokens, topk, generator=generator) >= missing
    combined = torch.randn(num_tokens * topk, hidden_size, generator=generator).bfloat16()
    weights = torch.randn(num_tokens, topk, generator=generator)
    combined[~mask.flatten()] = NAN
    weights[~mask] = NAN
    return combined, weights, mask, torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()


def chain(combined: Tensor, weights: Tensor, mask: Tensor, shared: Tensor | None) -> Tensor:
    """acc = fma(w_k, row_k, acc) for k ascending, from float64: the product of float32 and bfloat16 is exact there."""
    num_tokens, topk = weights.shape
    acc = torch.zeros(num_tokens, combined.shape[1]) if shared is None else shared.float()
    for k in range(topk):
        sums = weights[:, k, None].double() * combined[k::topk].double() + acc.double()
        acc = torch.where(mask[:, k, None], sums.float(), acc)
    return acc.bfloat16()


@hypothesis.given(
    num_tokens=st.sampled_from([0, 1, 7, 8, 9]) | st.integers(0, 150),
    topk=st.sampled_from(TOPKS),
    hidden_size=st.sampled_from(HIDDEN_SIZES[:2]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    has_shared=st.booleans(),
    seed=st.integers(0, 999),
    data=st.data(),
)
@hypothesis.settings(max_examples=60)
def test_output_is_the_chain(
    num_tokens: int, topk: int, hidden_size: int, missing: float, has_shared: bool, seed: int, data: st.DataObject
) -> None:
    combined, weights, mask, shared = inputs(num_tokens, topk, hidden_size, seed, missing)
    arguments = (combined, weights, mask, shared if has_shared else None)
    out = reduce.launch(*arguments, group=data.draw(groups(1)))
    assert out.shape == (num_tokens, hidden_size)
    assert same_bits(out, chain(*arguments))
    assert same_bits(out, reduce.reference(*arguments))


@pytest.mark.parametrize("topk", [*TOPKS, 64])
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_output_of_every_width(hidden_size: int, topk: int) -> None:
    combined, weights, mask, shared = inputs(11, topk, hidden_size, topk, 0.2)
    assert same_bits(reduce.launch(combined, weights, mask, shared), chain(combined, weights, mask, shared))


def test_every_cell_counts_once_and_where_it_belongs() -> None:
    # Cell (token, k, column) is 1 in one column of its own; its weight says (token, k).
    num_tokens, topk, hidden_size = 13, 6, 192
    token, k = torch.arange(num_tokens)[:, None], torch.arange(topk)
    column = (token * topk + k) % hidden_size
    combined = torch.nn.functional.one_hot(column.flatten(), hidden_size).bfloat16()
    weights = (1 + token * topk + k).float()
    out = reduce.launch(combined, weights, torch.ones(num_tokens, topk, dtype=torch.bool), None)
    want = torch.zeros(num_tokens, hidden_size).scatter(1, column, weights).bfloat16()
    assert same_bits(out, want)


def test_multiply_and_add_round_once_and_in_order() -> None:
    # The float32 product is 1 + 2^-7 + 2^-23; exactly it is 2^-30 more, which only a fused multiply-add sees.
    row, weight = 1 + 2.0**-7, 1 + 2.0**-23
    rows = torch.full((2, 64), row).bfloat16()
    both = torch.ones(1, 2, dtype=torch.bool)
    out = reduce.launch(rows, torch.tensor([[weight, -weight]]), both, None)
    assert torch.equal(out, torch.full((1, 64), -(2.0**-30)).bfloat16())
    # 2^30 + 1 is 2^30 again: the small one is lost in this order and kept in the other.
    rows = torch.tensor([[1.0], [2.0**30], [-(2.0**30)]]).expand(3, 64).bfloat16()
    for order, want in (([0, 1, 2], 0.0), ([1, 2, 0], 1.0), ([1, 0, 2], 0.0)):
        out = reduce.launch(rows[order], torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), None)
        assert out.unique().tolist() == [want]


def test_tokens_without_routes_keep_the_bits_of_shared() -> None:
    combined, weights, mask, shared = inputs(20, 2, 64, 1, 1.0)
    shared[3], shared[4], shared[5] = -0.0, float("inf"), NAN
    assert same_bits(reduce.launch(combined, weights, mask, shared), shared)
    alone = reduce.launch(combined, weights, mask, None)
    assert not alone.view(torch.int16).any()


def test_special_values_pass() -> None:
    combined = torch.tensor([[float("inf"), -0.0, NAN, 3e38]]).bfloat16().repeat(1, 16)
    for weight, want in ((0.0, [NAN, 0.0, NAN, 0.0]), (-2.0, [-float("inf"), 0.0, NAN, -float("inf")])):
        out = reduce.launch(combined, torch.tensor([[weight]]), torch.ones(1, 1, dtype=torch.bool), None)
        torch.testing.assert_close(out[0, :4].float(), torch.tensor(want), rtol=0, atol=0, equal_nan=True)


def test_views_and_workers_change_nothing() -> None:
    combined, weights, mask, shared = inputs(50, 6, 192, 2, 0.2)
    views = [t.t().contiguous().t() for t in (combined, weights, mask, shared)]
    assert not any(view.is_contiguous() for view in views)
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        assert same_bits(reduce.launch(*views, group=group), chain(combined, weights, mask, shared))


def test_what_is_wrong_is_named() -> None:
    combined, weights, mask, shared = inputs(4, 3, 64, 0, 0.0)
    with pytest.raises(TypeError, match=r"combined must be torch\.bfloat16 for the kernel, got torch\.float32"):
        reduce.launch(combined.float(), weights, mask, shared.float())
    with pytest.raises(TypeError, match=r"router_weights have dtype torch\.bfloat16"):
        reduce.launch(combined, weights.bfloat16(), mask, shared)
    with pytest.raises(ValueError, match="H of combined must be a positive multiple of 64 for the kernel, got 60"):
        reduce.launch(combined[:, :60], weights, mask, None)
    with pytest.raises(ValueError, match=r"T\*K = 12"):
        reduce.launch(combined[:5], weights, mask, shared)
    with pytest.raises(ValueError, match="group has 2 ranks, the arguments are for 1"):
        reduce.launch(combined, weights, mask, shared, group=LocalGroup(2))
    with pytest.raises(ValueError, match=r"group must be where the arguments are, on cpu, got cuda:0"):
        reduce.launch(combined, weights, mask, shared, group=LocalGroup(1, device="cuda:0"))
