"""The dispatch stage alone, pull and push: every row bit for bit, padding zero, against the reference."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import HIDDEN_SIZES, KINDS, Routing, groups, identified, routing, routings, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import dispatch, schedule
from mok_modular.stages.tables import kernel_tables
from mok_modular.targets import host_stage

DIRECTIONS = ("pull", "push")


def tokens(case: Routing, hidden_size: int) -> list[Tensor]:
    return [identified(rank, len(ids), hidden_size) for rank, ids in enumerate(case.ids)]


def check_rows(case: Routing, rows: list[Tensor], hidden_size: int, row_block: int) -> None:
    """Every row says whose it is; nothing else came, and padding is (positive) zeros."""
    tables = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    for owner, (have, table) in enumerate(zip(rows, tables, strict=True)):
        assert have.shape == (len(table.peer_rank), hidden_size) and have.dtype == torch.bfloat16
        want = torch.zeros_like(have)
        for rank, ids in enumerate(case.ids):
            mine = table.peer_rank == rank
            want[mine] = identified(rank, len(ids), hidden_size)[table.peer_token_idx[mine].long() // case.topk]
        assert same_bits(have, want), owner
        assert not have[table.peer_rank < 0].view(torch.int16).any()


@hypothesis.given(
    case=routings(),
    hidden_size=st.sampled_from(HIDDEN_SIZES[:3]),
    row_block=st.sampled_from([128, 256]),
    direction=st.sampled_from(DIRECTIONS),
    data=st.data(),
)
@hypothesis.settings(max_examples=100)
def test_rows_are_those_of_the_reference(
    case: Routing, hidden_size: int, row_block: int, direction: str, data: st.DataObject
) -> None:
    xs, group = tokens(case, hidden_size), data.draw(groups(len(case.ids)))
    tables = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    rows = dispatch.launch(xs, tables, topk=case.topk, direction=direction, group=group)
    check_rows(case, rows, hidden_size, row_block)
    for have, want in zip(rows, dispatch.reference(xs, tables, topk=case.topk), strict=True):
        assert same_bits(have, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_of_routing(kind: str, direction: str) -> None:
    case = routing([61, 0, 300, 5], num_experts=8, topk=6, kind=kind, seed=2)
    tables = schedule.reference(case.ids, num_experts=8)
    check_rows(case, dispatch.launch(tokens(case, 192), tables, topk=6, direction=direction), 192, 128)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_a_built_schedule(direction: str) -> None:
    case = routing([33, 90], num_experts=6, topk=10, kind="missing", seed=4)
    built = schedule.launch(case.ids, num_experts=6, row_block=256)
    check_rows(case, dispatch.launch(tokens(case, 2880), built, topk=10, direction=direction), 2880, 256)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_tokens", [[0], [0, 0], [0, 3], [1, 0, 0, 0]])
def test_next_to_nothing(num_tokens: list[int], direction: str) -> None:
    case = routing(num_tokens, num_experts=2 * len(num_tokens), topk=2)
    tables = schedule.reference(case.ids, num_experts=case.num_experts)
    rows = dispatch.launch(tokens(case, 64), tables, topk=2, direction=direction)
    check_rows(case, rows, 64, 128)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_bits_pass_and_views_do(direction: str) -> None:
    case = routing([40, 25], num_experts=4, topk=2, seed=6)
    xs = [torch.randint(-(2**15), 2**15, (64, len(ids))).to(torch.int16).view(torch.bfloat16).t() for ids in case.ids]
    assert all(x.isnan().any() and not x.is_contiguous() for x in xs)
    tables = schedule.reference(case.ids, num_experts=4)
    rows = dispatch.launch(xs, tables, topk=2, direction=direction, group=LocalGroup(2, executor="threads"))
    for have, table in zip(rows, tables, strict=True):
        for i, (rank, route) in enumerate(zip(table.peer_rank.tolist(), table.peer_token_idx.tolist(), strict=True)):
            assert same_bits(have[i], xs[rank][route // 2] if rank >= 0 else torch.zeros(64).bfloat16())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_else_is_written(direction: str) -> None:
    # Memory is 0xff before. Rows past a rank's last keep it, and a pusher's padding rows too: it does not write them.
    case = routing([61, 0, 300, 5], num_experts=8, topk=6, kind="one rank", seed=2)
    tables = schedule.reference(case.ids, num_experts=8)
    by_rank, row_block = kernel_tables(tables)
    run = host_stage.HostStageRun(
        "dispatch",
        by_rank,
        row_block=row_block,
        num_tokens=[len(ids) for ids in case.ids],
        topk=6,
        hidden_size=192,
        is_push_dispatch=direction == "push",
    )
    xs = tokens(case, 192)
    for rank, x in enumerate(xs):
        run.fill(rank, "x", x)
    stats = run.launch([{"x": x} for x in xs])
    for rank, table in enumerate(tables):
        rows = run.region(rank, "ring_x", 192).view(torch.int16)
        is_written = torch.zeros(len(rows), dtype=torch.bool)
        is_written[: len(table.peer_rank)] = (table.peer_rank >= 0) | (direction == "pull")
        assert (rows[~is_written] == -1).all()
        assert (rows[is_written] != -1).all()
        moved = table.peer_rank if direction == "pull" else table.route_rank
        assert sum(row["num_rows"] for row in stats[rank]) == int((moved >= 0).sum())


def test_what_is_wrong_is_named() -> None:
    case = routing([4, 4], num_experts=4, topk=3)
    xs, tables = tokens(case, 64), schedule.reference(case.ids, num_experts=4)
    with pytest.raises(TypeError, match=r"xs\[1\] must be torch.bfloat16 for the kernel, got torch.float16"):
        dispatch.launch([xs[0], xs[1].half()], tables, topk=3)
    with pytest.raises(ValueError, match="direction must be 'pull' or 'push', got 'fetch'"):
        dispatch.launch(xs, tables, topk=3, direction="fetch")
    with pytest.raises(ValueError, match=r"route_rank and route_row must be \[T\*K\] = \[8\], got \[12\]"):
        dispatch.launch(xs, tables, topk=2)
    with pytest.raises(ValueError, match="group has 3 ranks, the arguments are for 2"):
        dispatch.launch(xs, tables, topk=3, group=LocalGroup(3))
    with pytest.raises(ValueError, match=r"row_block must be one of \(128, 256\) here, got 64"):
        dispatch.launch(xs, schedule.reference(case.ids, num_experts=4, row_block=64), topk=3)
