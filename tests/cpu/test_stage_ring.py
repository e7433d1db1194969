"""The ring's arithmetic: the compiled one against the reference, the reference against what a ring is."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from mok_modular.stages import ring


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """num_rows, ring_rows, minibatch, row_block; rings of no whole number of minibatches too."""
    row_block = draw(st.sampled_from([1, 32, 128, 256]))
    num_blocks, ring_blocks, slot_blocks = draw(st.integers(0, 60)), draw(st.integers(1, 20)), draw(st.integers(1, 7))
    return num_blocks * row_block, ring_blocks * row_block, slot_blocks * row_block, row_block


@hypothesis.given(rings())
@hypothesis.settings(max_examples=300)
def test_compiled_arithmetic_is_the_references(numbers: tuple[int, int, int, int]) -> None:
    assert ring.launch(*numbers) == ring.reference(*numbers)


@hypothesis.given(rings())
@hypothesis.settings(max_examples=100)
def test_no_row_is_overwritten_before_its_slot_is_free(numbers: tuple[int, int, int, int]) -> None:
    num_rows, ring_rows, minibatch, row_block = numbers
    blocks = ring.launch(*numbers)
    assert len(blocks) == num_rows // row_block
    slots: dict[tuple[int, int], list[int]] = {}
    for i, block in enumerate(blocks):
        assert block.macrobatch * ring_rows + block.ring_row == i * row_block
        assert 0 <= block.ring_row <= ring_rows - row_block
        assert block.ring_row // minibatch == block.slot
        slots.setdefault((block.macrobatch, block.slot), []).append(i)
    for (macrobatch, slot), members in slots.items():
        assert {blocks[i].slot_num_blocks for i in members} == {len(members)}
        # Visited before: higher macrobatches. The nearest that used the slot, and there is a wait if any did.
        before = [m for m, s in slots if s == slot and m > macrobatch]
        assert {blocks[i].predecessor for i in members} == {min(before, default=-1)}


def test_a_partial_macrobatch_frees_only_the_slots_that_it_used() -> None:
    # Four blocks a ring, two a slot; the last macrobatch has one block.
    assert ring.launch(9 * 128, 4 * 128, 2 * 128, 128) == [
        ring.RingBlock(0, 0, 0, 1, 2),
        ring.RingBlock(0, 128, 0, 1, 2),
        ring.RingBlock(0, 256, 1, 1, 2),
        ring.RingBlock(0, 384, 1, 1, 2),
        ring.RingBlock(1, 0, 0, 2, 2),
        ring.RingBlock(1, 128, 0, 2, 2),
        ring.RingBlock(1, 256, 1, -1, 2),
        ring.RingBlock(1, 384, 1, -1, 2),
        ring.RingBlock(2, 0, 0, -1, 1),
    ]


def test_many_rows_do_not_overflow() -> None:
    row_block = 2**20
    numbers = (2**31 - 6 * row_block, 5 * row_block, 2 * row_block, row_block)
    assert ring.launch(*numbers) == ring.reference(*numbers)


@pytest.mark.parametrize("run", [ring.reference, ring.launch])
def test_what_is_wrong_is_named(run: Callable[[int, int, int, int], list[ring.RingBlock]]) -> None:
    with pytest.raises(ValueError, match="num_rows=100 must be a multiple of row_block=128"):
        run(100, 128, 128, 128)
    with pytest.raises(ValueError, match="ring_rows=0 must be a multiple of row_block=128, at least 1"):
        run(128, 0, 128, 128)
    with pytest.raises(ValueError, match="minibatch=-128"):
        run(128, 128, -128, 128)
    with pytest.raises(ValueError, match="row_block=0"):
        run(128, 128, 128, 0)
