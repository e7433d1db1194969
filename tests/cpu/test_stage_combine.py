"""The combine stage alone, push and pull: every cell bit for bit, padding sent nowhere, against the reference."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, KINDS, Routing, groups, identified, routing, routings, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import combine, schedule
from mok_modular.stages.tables import Tables, kernel_tables
from mok_modular.targets import host_stage

DIRECTIONS = ("push", "pull")


def outputs(tables: list[Tables], hidden_size: int) -> list[Tensor]:
    """Every rank's y; padding rows and some beyond are NaN."""
    ys = []
    for rank, table in enumerate(tables):
        y = identified(rank, len(table.peer_rank) + 3, hidden_size)
        y[: len(table.peer_rank)][table.peer_rank < 0] = float("nan")
        y[len(table.peer_rank) :] = float("nan")
        ys.append(y)
    return ys


def check_cells(case: Routing, cells: list[Tensor], hidden_size: int, row_block: int) -> None:
    """Every cell says which row it came from; the cells of missing routes are still zero."""
    tables = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    for rank, (have, table) in enumerate(zip(cells, tables, strict=True)):
        assert have.shape == (case.ids[rank].numel(), hidden_size) and have.dtype == torch.bfloat16
        want = torch.zeros_like(have)
        for owner, owned in enumerate(tables):
            mine = table.route_rank == owner
            want[mine] = identified(owner, len(owned.peer_rank), hidden_size)[table.route_row[mine].long()]
        assert same_bits(have, want), rank


@hypothesis.given(
    case=routings(),
    hidden_size=st.sampled_from(HIDDEN_SIZES[:3]),
    row_block=st.sampled_from([128, 256]),
    direction=st.sampled_from(DIRECTIONS),
    data=st.data(),
)
@hypothesis.settings(max_examples=100)
def test_cells_are_those_of_the_reference(
    case: Routing, hidden_size: int, row_block: int, direction: str, data: st.DataObject
) -> None:
    group = data.draw(groups(len(case.ids)))
    tables = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    ys = outputs(tables, hidden_size)
    cells = combine.launch(ys, tables, direction=direction, group=group)
    check_cells(case, cells, hidden_size, row_block)
    for have, want in zip(cells, combine.reference(ys, tables), strict=True):
        assert same_bits(have, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_cells_of_every_kind_of_routing(kind: str, direction: str) -> None:
    case = routing([61, 0, 300, 5], num_experts=8, topk=6, kind=kind, seed=2)
    tables = schedule.reference(case.ids, num_experts=8)
    check_cells(case, combine.launch(outputs(tables, 192), tables, direction=direction), 192, 128)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cells_of_a_built_schedule(direction: str) -> None:
    case = routing([33, 90], num_experts=6, topk=10, kind="missing", seed=4)
    built = schedule.launch(case.ids, num_experts=6, row_block=256)
    tables = schedule.reference(case.ids, num_experts=6, row_block=256)
    cells = combine.launch(outputs(tables, 2880), built, direction=direction, group=LocalGroup(2, executor="threads"))
    check_cells(case, cells, 2880, 256)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_tokens", [[0], [0, 0], [0, 3], [1, 0, 0, 0]])
def test_next_to_nothing(num_tokens: list[int], direction: str) -> None:
    case = routing(num_tokens, num_experts=2 * len(num_tokens), topk=2)
    tables = schedule.reference(case.ids, num_experts=case.num_experts)
    check_cells(case, combine.launch(outputs(tables, 64), tables, direction=direction), 64, 128)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_bits_pass_and_views_do(direction: str) -> None:
    case = routing([40, 25], num_experts=4, topk=2, seed=6)
    tables = schedule.reference(case.ids, num_experts=4)
    ys = [
        torch.randint(-(2**15), 2**15, (64, len(t.peer_rank))).to(torch.int16).view(torch.bfloat16).t() for t in tables
    ]
    assert all(y.isnan().any() and not y.is_contiguous() for y in ys)
    for have, table in zip(combine.launch(ys, tables, direction=direction), tables, strict=True):
        for i, (rank, row) in enumerate(zip(table.route_rank.tolist(), table.route_row.tolist(), strict=True)):
            assert same_bits(have[i], ys[rank][row])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_else_is_written(direction: str) -> None:
    # Memory is 0xff before. Missing routes keep it, and so does what a rank with fewer tokens does not need.
    case = routing([61, 0, 300, 5], num_experts=8, topk=6, kind="missing", seed=2)
    tables = schedule.reference(case.ids, num_experts=8)
    by_rank, row_block = kernel_tables(tables)
    run = host_stage.HostStageRun(
        "combine",
        by_rank,
        row_block=row_block,
        num_tokens=[len(ids) for ids in case.ids],
        topk=6,
        hidden_size=192,
        is_pull_combine=direction == "pull",
    )
    for rank, y in enumerate(outputs(tables, 192)):
        run.fill(rank, "ring_y", y[: len(tables[rank].peer_rank)])
    stats = run.launch()
    for rank, table in enumerate(tables):
        cells = run.region(rank, "combine", 192).view(torch.int16)
        assert len(cells) == 300 * 6
        is_written = torch.zeros(len(cells), dtype=torch.bool)
        is_written[: len(table.route_rank)] = table.route_rank >= 0
        assert (cells[~is_written] == -1).all()
        assert (cells[is_written] != -1).all()
        moved = table.route_rank if direction == "pull" else table.peer_rank
        assert sum(row["num_rows"] for row in stats[rank]) == int((moved >= 0).sum())


def test_what_is_wrong_is_named() -> None:
    case = routing([4, 4], num_experts=4, topk=3)
    tables = schedule.reference(case.ids, num_experts=4)
    ys = outputs(tables, 64)
    with pytest.raises(TypeError, match=r"ys\[0\] must be torch.bfloat16 for the kernel, got torch.float32"):
        combine.launch([ys[0].float(), ys[1]], tables)
    with pytest.raises(ValueError, match="direction must be 'push' or 'pull', got 'fetch'"):
        combine.launch(ys, tables, direction="fetch")
    with pytest.raises(ValueError, match=r"ys\[1\] has 100 rows"):
        combine.launch([ys[0], ys[1][:100]], tables)
    with pytest.raises(ValueError, match="group has 1 ranks, the arguments are for 2"):
        combine.launch(ys, tables, group=LocalGroup(1))
