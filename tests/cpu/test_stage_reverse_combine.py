"""The reverse_combine stage alone: every row and weight bit for bit, padding zero, against the reference."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, Routing, groups, identified, routing, routings, same_bits
from torch import Tensor

from mok_modular.stages import dispatch, reverse_combine, schedule


def gradients(case: Routing, hidden_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """d_outputs and router weights that say whose they are; no row comes of a missing route, so its weight is NaN."""
    d_outputs = [identified(rank, len(ids), hidden_size) for rank, ids in enumerate(case.ids)]
    weights = []
    for rank, ids in enumerate(case.ids):
        own = torch.arange(ids.numel()).view(ids.shape) + 1000.25 * (rank + 1)
        weights.append(own.where(ids >= 0, float("nan")))
    return d_outputs, weights


@hypothesis.given(
    case=routings(),
    hidden_size=st.sampled_from(HIDDEN_SIZES[:3]),
    row_block=st.sampled_from([128, 256]),
    data=st.data(),
)
@hypothesis.settings(max_examples=50)
def test_rows_and_weights_are_those_of_the_reference(
    case: Routing, hidden_size: int, row_block: int, data: st.DataObject
) -> None:
    given, group = gradients(case, hidden_size), data.draw(groups(len(case.ids)))
    tables = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    launched = reverse_combine.launch(*given, tables, topk=case.topk, group=group)
    wanted = reverse_combine.reference(*given, tables, topk=case.topk)
    rows = dispatch.reference(given[0], tables, topk=case.topk)
    for (have, weights), (want, want_weights), row, table in zip(launched, wanted, rows, tables, strict=True):
        assert same_bits(have, want)
        assert same_bits(weights, want_weights)
        assert same_bits(have, row)  # d_output goes where x went
        for src, idx, weight in zip(table.peer_rank.tolist(), table.peer_token_idx.tolist(), weights, strict=True):
            assert float(weight) == (0.0 if src < 0 else float(given[1][src].view(-1)[idx]))


def test_workers_and_executors() -> None:
    from mok_modular import LocalGroup

    case = routing([61, 0, 200, 5], num_experts=8, topk=6, seed=2)
    given = gradients(case, 192)
    tables = schedule.reference(case.ids, num_experts=8)
    want = reverse_combine.reference(*given, tables, topk=6)
    for executor in ("fibers", "threads"):
        group = LocalGroup(4, order="random", executor=executor, num_workers=3)
        for mine, theirs in zip(reverse_combine.launch(*given, tables, topk=6, group=group), want, strict=True):
            assert same_bits(mine[0], theirs[0])
            assert same_bits(mine[1], theirs[1])


def test_what_is_wrong_is_named() -> None:
    case = routing([5, 3], num_experts=4, topk=2)
    d_outputs, weights = gradients(case, 64)
    tables = schedule.reference(case.ids, num_experts=4)
    with pytest.raises(ValueError, match=r"router_weights must hold \[T, K\] = \[\(5, 2\), \(3, 2\)\], not \[\(5, 1\)"):
        reverse_combine.reference(d_outputs, [w[:, :1] for w in weights], tables, topk=2)
    with pytest.raises(TypeError, match=r"router_weights must be torch\.float32"):
        reverse_combine.reference(d_outputs, [w.bfloat16() for w in weights], tables, topk=2)
    with pytest.raises(
        TypeError, match=r"router_weights\[0\] must be torch\.float32 for the kernel, got torch\.float64"
    ):
        reverse_combine.launch(d_outputs, [w.double() for w in weights], tables, topk=2)
    with pytest.raises(TypeError, match=r"d_outputs\[0\] must be torch\.bfloat16 for the kernel"):
        reverse_combine.launch([d.float() for d in d_outputs], weights, tables, topk=2)
    with pytest.raises(ValueError, match="d_outputs must hold"):
        reverse_combine.reference([], [], tables, topk=2)
    with pytest.raises(ValueError, match="topk=0 must be at least 1"):
        reverse_combine.reference(d_outputs, weights, tables, topk=0)
