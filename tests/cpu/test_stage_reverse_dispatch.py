"""The reverse_dispatch stage alone: every cell bit for bit, d_router summed in ascending order."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, Routing, groups, identified, routing, routings, same_bits
from torch import Tensor

from mok_modular.stages import combine, reverse_dispatch, schedule
from mok_modular.stages.tables import Tables


def rows_of(tables: list[Tables], hidden_size: int, num_groups: int) -> tuple[list[Tensor], list[Tensor]]:
    """d_x and partial sums of every row; NaN in padding."""
    d_xs, partials = [], []
    for rank, table in enumerate(tables):
        num_rows = int(table.segment_start[-1])
        is_padding = table.peer_rank[:num_rows] < 0
        d_xs.append(identified(rank, num_rows, hidden_size))
        generator = torch.Generator().manual_seed(rank)
        partials.append(torch.randn(num_rows, num_groups, generator=generator))
        d_xs[-1][is_padding] = float("nan")
        partials[-1][is_padding] = float("nan")
    return d_xs, partials


@hypothesis.given(
    case=routings(),
    hidden_size=st.sampled_from(HIDDEN_SIZES[:3]),
    num_groups=st.sampled_from([2, 6, 20]),
    row_block=st.sampled_from([128, 256]),
    data=st.data(),
)
@hypothesis.settings(max_examples=50)
def test_cells_are_those_of_the_reference(
    case: Routing, hidden_size: int, num_groups: int, row_block: int, data: st.DataObject
) -> None:
    tables = list(schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block))
    given, group = rows_of(tables, hidden_size, num_groups), data.draw(groups(len(case.ids)))
    launched = reverse_dispatch.launch(*given, tables, group=group)
    wanted = reverse_dispatch.reference(*given, tables)
    cells = combine.reference(given[0], tables)
    for (d_x, d_router), (want, want_router), cell in zip(launched, wanted, cells, strict=True):
        assert same_bits(d_x, want)
        assert same_bits(d_router, want_router)
        assert same_bits(d_x, cell)  # d_x goes where y went


def test_groups_are_summed_in_ascending_order() -> None:
    case = routing([3], num_experts=1, topk=1)
    tables = list(schedule.reference(case.ids, num_experts=1))
    d_xs, partials = rows_of(tables, 64, 4)
    partials[0][:3] = torch.tensor([1.0, 1e8, -1e8, 2.0])  # (1 + 1e8) loses the 1
    for which in (reverse_dispatch.reference, reverse_dispatch.launch):
        assert which(d_xs, partials, tables)[0][1].tolist() == [2.0, 2.0, 2.0]


def test_what_is_wrong_is_named() -> None:
    case = routing([5, 3], num_experts=4, topk=2)
    tables = list(schedule.reference(case.ids, num_experts=4))
    d_xs, partials = rows_of(tables, 64, 2)
    with pytest.raises(ValueError, match=r"router_partials must hold \[num_rows, I/32\] with num_rows"):
        reverse_dispatch.reference(d_xs, [p[:, 0] for p in partials], tables)
    with pytest.raises(TypeError, match=r"router_partials must be torch\.float32"):
        reverse_dispatch.reference(d_xs, [p.bfloat16() for p in partials], tables)
    with pytest.raises(TypeError, match=r"router_partials\[0\] must be torch\.float32 for the kernel"):
        reverse_dispatch.launch(d_xs, [p.double() for p in partials], tables)
    with pytest.raises(ValueError, match="d_xs must hold"):
        reverse_dispatch.reference([d[0] for d in d_xs], partials, tables)
    with pytest.raises(ValueError, match=r"d_xs\[0\] has 1 rows, its schedule has"):
        reverse_dispatch.reference([d[:1] for d in d_xs], [p[:1] for p in partials], tables)
