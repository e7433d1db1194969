"""Ring: which slot of the token buffer holds a row, and whose use of it must be over before.

No tensors and no kernel of its own inside a layer, only arithmetic that all stages share; here it stands alone.
"""

from __future__ import annotations

from typing import NamedTuple

from mok_modular.protocol.extension import extension


class RingBlock(NamedTuple):
    """Where one row block stands."""

    macrobatch: int  # the pass through the ring; forward walks them from the last to 0
    ring_row: int  # its first row in the ring
    slot: int  # the window of `minibatch` rows of the ring that it lies in
    predecessor: int  # the macrobatch that must have freed the slot before, -1 for none
    slot_num_blocks: int  # row blocks that its macrobatch has in the slot


def reference(num_rows: int, ring_rows: int, minibatch: int, row_block: int) -> list[RingBlock]:
    """Returns one RingBlock for every row block of a rank with `num_rows` rows, in order of rows.

    Macrobatch m holds rows [m * ring_rows, (m + 1) * ring_rows); the last may be shorter. The slots of the ring
    are windows of `minibatch` rows, the last of them shorter where `ring_rows` is no multiple. A slot's
    predecessor in forward is whoever used it last, on the way from the last macrobatch down to 0.

    Raises ValueError unless all numbers are multiples of `row_block`, at least 1 (`num_rows`: 0).
    """
    _check(num_rows, ring_rows, minibatch, row_block)
    members: dict[tuple[int, int], list[int]] = {}  # rows of the row blocks of each (macrobatch, slot)
    for row in range(0, num_rows, row_block):
        macrobatch, ring_row = divmod(row, ring_rows)
        members.setdefault((macrobatch, ring_row // minibatch), []).append(row)
    last_user: dict[int, int] = {}
    blocks: dict[int, RingBlock] = {}
    for macrobatch, slot in sorted(members, reverse=True):
        rows = members[macrobatch, slot]
        for row in rows:
            predecessor = last_user.get(slot, -1)
            blocks[row] = RingBlock(macrobatch, row - macrobatch * ring_rows, slot, predecessor, len(rows))
        last_user[slot] = macrobatch
    return [blocks[row] for row in sorted(blocks)]


def launch(num_rows: int, ring_rows: int, minibatch: int, row_block: int) -> list[RingBlock]:
    """``reference`` by the compiled arithmetic of csrc/protocol/ring.h."""
    _check(num_rows, ring_rows, minibatch, row_block)
    shape = extension().Shape()
    shape.row_block, shape.minibatch = row_block, minibatch
    shape.ring_rows, shape.capacity_rows = ring_rows, num_rows
    return [RingBlock(*row) for row in extension().ring_table(shape, num_rows)]


def _check(num_rows: int, ring_rows: int, minibatch: int, row_block: int) -> None:
    if row_block < 1:
        raise ValueError(f"row_block={row_block} must be at least 1")
    for name, value, minimum in (("num_rows", num_rows, 0), ("ring_rows", ring_rows, 1), ("minibatch", minibatch, 1)):
        if value < minimum or value % row_block:
            raise ValueError(f"{name}={value} must be a multiple of row_block={row_block}, at least {minimum}")
