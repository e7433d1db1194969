"""The schedule stage alone: its tables against the reference's, its windows against the rules of the order of work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from stage_data import KINDS, TOPKS, Routing, groups, routing, routings

from mok_modular import LocalGroup, MoKConfig, MoKSchedule
from mok_modular.stages import schedule


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives the largest integers: what the stage does not write, it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check_tables(case: Routing, built: list[MoKSchedule], row_block: int) -> None:
    expected = schedule.reference(case.ids, num_experts=case.num_experts, row_block=row_block)
    for rank, (have, want) in enumerate(zip(built, expected, strict=True)):
        assert all(table.dtype == torch.int32 for table in have.tensors().values())
        num_rows = len(want.peer_rank)
        assert have.num_rows == num_rows <= len(have.peer_rank)
        for name in ("peer_rank", "peer_token_idx"):
            table = getattr(have, name)
            assert torch.equal(table[:num_rows], getattr(want, name)), (rank, name)
            assert (table[num_rows:] == -1).all(), (rank, name)
        for name in ("segment_start", "segment_num_rows", "route_rank", "route_row"):
            assert torch.equal(getattr(have, name), getattr(want, name)), (rank, name)
        assert torch.equal(have.row_block_expert[: num_rows // row_block], want.row_block_expert)
        # Own routes by expert, the earlier before the later; then nothing that anyone reads.
        ids = case.ids[rank].flatten()
        routes = [route for route in ids.argsort(stable=True).tolist() if ids[route] >= 0]
        assert have.sorted_route[: len(routes)].tolist() == routes
        # Where each peer's token comes first, if rows are pulled once.
        topk, max_tokens = case.ids[0].shape[1], max(map(len, case.ids))
        for peer, route in zip(want.peer_rank.tolist(), want.peer_token_idx.tolist(), strict=True):
            if have.token_row.numel() and peer not in (-1, rank):
                rows = (want.peer_rank == peer) & (want.peer_token_idx // topk == route // topk)
                assert have.token_row[peer * max_tokens + route // topk] == rows.nonzero()[0]
        assert have.counts.tolist() == [num_rows, int(have.counts[1]), len(routes), num_rows, 1]


def check_windows(built: MoKSchedule, row_block: int, config: MoKConfig) -> None:
    num_blocks, num_windows = built.num_rows // row_block, int(built.counts[1])
    ring_blocks = min(config.macrobatch_size, len(built.peer_rank)) // row_block
    slot_blocks = config.minibatch_size // row_block
    assert num_windows < len(built.window_start)  # the bound of the layout
    starts = built.window_start[: num_windows + 1].tolist()
    assert starts[0] == 0 and starts[-1] == num_blocks
    assert all(a < b for a, b in itertools.pairwise(starts))
    num_generations = -(-num_blocks // ring_blocks)
    first_windows = built.generation_window[: num_generations + 1].tolist()
    assert first_windows[-1] == num_windows
    # None crosses a macrobatch: each begins with a window of its own.
    assert [starts[w] for w in first_windows[:-1]] == list(range(0, num_blocks, ring_blocks))
    boundaries = {start // row_block for start in built.segment_start.tolist()}
    for begin, end in itertools.pairwise(starts):
        macrobatch_end = min((begin // ring_blocks + 1) * ring_blocks, num_blocks)
        full = min(begin + slot_blocks, macrobatch_end)
        want = full
        if config.signal_grain == "row_block" and full < macrobatch_end:
            inside = [b for b in boundaries if begin < b <= full]
            expert_end = min(b for b in boundaries if b > full)  # of the expert that would be cut
            if inside:
                want = max(inside)
            elif expert_end - begin <= slot_blocks + slot_blocks // 2:
                want = min(expert_end, macrobatch_end)
        assert end == want, (begin, end)


@hypothesis.given(case=routings(), row_block=st.sampled_from([128, 256]), data=st.data())
@hypothesis.settings(max_examples=100)
def test_tables_are_those_of_the_reference(case: Routing, row_block: int, data: st.DataObject) -> None:
    group = data.draw(groups(len(case.ids)))
    check_tables(
        case, schedule.launch(case.ids, num_experts=case.num_experts, row_block=row_block, group=group), row_block
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [[5, 0, 9], [120, 100]], ids=str)
def test_first_rows_of_tokens_that_are_pulled_once(num_tokens: list[int], kind: str) -> None:
    case = routing(num_tokens, num_experts=4 * len(num_tokens), topk=6, kind=kind, seed=1)
    config = MoKConfig(dispatch="pull_once")
    built = schedule.launch(case.ids, num_experts=case.num_experts, config=config)
    assert all(table.token_row.numel() == len(num_tokens) * max(num_tokens) for table in built)
    check_tables(case, built, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topk", TOPKS)
def test_tables_over_several_chunks_of_ids(topk: int, kind: str) -> None:
    # A task takes 256 ids: full, partial and surplus chunks, and sums that no single chunk shows.
    num_tokens = [-(-1024 // topk), 256 // topk, 0, 512 // topk + 1]
    case = routing(num_tokens, num_experts=12, topk=topk, kind=kind, seed=topk)
    check_tables(case, schedule.launch(case.ids, num_experts=12), 128)


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(4, 512), (2, 34), (4, 4), (1, 1)])
def test_tables_for_many_and_for_few_experts(num_ranks: int, num_experts: int) -> None:
    case = routing([13, 0, 40, 7][:num_ranks], num_experts, topk=6, kind="missing", seed=3)
    check_tables(case, schedule.launch(case.ids, num_experts=num_experts), 128)


@pytest.mark.parametrize("num_tokens", [[0], [0, 0], [0, 1], [1, 0, 0, 0]])
def test_tables_of_next_to_nothing(num_tokens: list[int]) -> None:
    case = routing(num_tokens, num_experts=2 * len(num_tokens), topk=2)
    check_tables(case, schedule.launch(case.ids, num_experts=case.num_experts), 128)


@hypothesis.given(
    num_blocks=st.lists(st.sampled_from([0, 1, 1, 2, 3, 8]), min_size=8, max_size=24),
    num_ranks=st.sampled_from([1, 2]),
    row_block=st.sampled_from([128, 256]),
    slot_blocks=st.integers(1, 7),
    num_slots=st.integers(1, 5),
    signal_grain=st.sampled_from(["row_block", "row_block", "minibatch"]),
)
@hypothesis.settings(max_examples=150)
def test_windows_keep_the_rules(
    num_blocks: list[int], num_ranks: int, row_block: int, slot_blocks: int, num_slots: int, signal_grain: str
) -> None:
    # Experts by their row blocks, on every rank alike; the tokens stand on rank 0.
    minibatch = slot_blocks * row_block
    config = MoKConfig(minibatch_size=minibatch, macrobatch_size=num_slots * minibatch, signal_grain=signal_grain)
    num_rows = torch.tensor([blocks * row_block - blocks % 2 for blocks in num_blocks] * num_ranks)
    ids = torch.arange(len(num_rows)).repeat_interleave(num_rows)[:, None]
    ids = [ids, *[ids[:0]] * (num_ranks - 1)]
    for built in schedule.launch(ids, num_experts=len(num_rows), row_block=row_block, config=config):
        assert built.num_rows == sum(num_blocks) * row_block
        check_windows(built, row_block, config)


def test_windows_end_between_experts_and_cut_only_the_long_ones() -> None:
    # Row blocks of the experts: 2, 2, 5, 1, 1; a minibatch is 3 blocks, a macrobatch 9.
    num_rows = [256, 200, 640, 1, 128]
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(num_rows))[:, None]
    config = MoKConfig(minibatch_size=3 * 128, macrobatch_size=9 * 128)
    (built,) = schedule.launch([ids], num_experts=5, config=config)
    assert built.window_start[: int(built.counts[1]) + 1].tolist() == [0, 2, 4, 7, 9, 11]
    assert built.generation_window[:3].tolist() == [0, 4, 5]


@pytest.mark.parametrize("executor", ["fibers", "threads"])
def test_orders_and_workers_change_nothing(executor: str) -> None:
    case = routing([50, 3, 0, 90], num_experts=8, topk=8, kind="missing", seed=5)
    for order in ("round_robin", "random", "last_first"):
        group = LocalGroup(4, order=order, seed=1, executor=executor, num_workers=3)
        check_tables(case, schedule.launch(case.ids, num_experts=8, group=group), 128)


def test_ids_may_be_views() -> None:
    case = routing([9, 12], num_experts=4, topk=6)
    case.ids[0] = case.ids[0].t().contiguous().t()
    assert not case.ids[0].is_contiguous()
    check_tables(case, schedule.launch(case.ids, num_experts=4), 128)


def test_what_is_wrong_is_named() -> None:
    ids = routing([4, 4], num_experts=8, topk=3).ids
    with pytest.raises(ValueError, match=r"num_experts=7 .* 2"):
        schedule.launch(ids, num_experts=7)
    with pytest.raises(ValueError, match="row_block must be 128, 256"):
        schedule.launch(ids, num_experts=8, row_block=64)
    with pytest.raises(ValueError, match="2 ids out of range"):
        schedule.launch([torch.tensor([[0, 8], [-2, -1]])], num_experts=8)
    with pytest.raises(TypeError, match="int16"):
        schedule.launch([ids[0].to(torch.int16), ids[1]], num_experts=8)
    with pytest.raises(ValueError, match="group has 3 ranks, top_experts is for 2"):
        schedule.launch(ids, num_experts=8, group=LocalGroup(3))


def test_more_rows_than_planned_are_an_error_with_both_numbers() -> None:
    case = routing([200, 200], num_experts=2, topk=1, kind="one expert")
    config = MoKConfig(schedule_capacity_multiplier=1.0)
    with pytest.raises(ValueError, match=r"512 rows come to rank 0, but .* leaves room for 256"):
        schedule.launch(case.ids, num_experts=2, config=config)
