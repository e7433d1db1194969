"""One stage's kernel alone: memory of its own, every wait satisfied beforehand, one launch.

`launch` of stages/*.py is made of this: lay out the stage's inputs in the regions that the kernel reads, run the
very kernel of a split plan, read its outputs. All rows are in one ring generation and one window (but for wgrad with a
carry), so a region holds all rows of its rank. Regions are full of NaN until something writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.extension import extension
from mok_modular.protocol.plan import Plan, group_mask
from mok_modular.ranks.group import LocalGroup
from mok_modular.targets.stage_arguments import ROW_BLOCKS


class StageRun:
    """The ranks of one launch, on any target.

    `tables` holds every rank's tables of rows (see `segment_tables`), with El local experts each; a width that the
    stage does not use may stay 0. `ring_rows` and `generation` (-1: all) are for rows that do not fit into one
    generation.

    Raises ValueError if `group` has another number of ranks or device, or `row_block` is none that the target has.
    """

    row_blocks: tuple[int, ...] = ROW_BLOCKS

    def __init__(
        self,
        stage: str,
        tables: Sequence[Mapping[str, Tensor]],
        *,
        row_block: int,
        num_tokens: Sequence[int],
        topk: int = 1,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        shared_size: int = 0,
        ring_rows: int | None = None,
        generation: int = -1,
        is_push_dispatch: bool = False,
        is_pull_combine: bool = False,
        kind: str = "forward",
        is_mxfp8: bool = False,
        group: LocalGroup | None = None,
    ) -> None:
        self.stage = stage
        self.tables = tables
        self.num_tokens = num_tokens
        self.group = group or LocalGroup(len(tables))
        if self.group.size() != len(tables):
            raise ValueError(f"group has {self.group.size()} ranks, the arguments are for {len(tables)}")
        if row_block not in self.row_blocks:
            raise ValueError(f"row_block must be one of {self.row_blocks} here, got {row_block}")
        shape = self.shape = extension().Shape()
        shape.num_ranks = len(tables)
        shape.max_tokens = max(num_tokens)
        shape.topk = topk
        shape.hidden_size = hidden_size
        shape.intermediate_size = intermediate_size
        shape.shared_size = shared_size
        shape.num_local_experts = tables[0]["segment_num_rows"].numel()
        shape.row_block = row_block
        shape.capacity_rows = max(row_block, *(int(t["counts"][0]) for t in tables))
        shape.ring_rows = shape.minibatch = ring_rows or shape.capacity_rows
        shape.is_push_dispatch = is_push_dispatch
        shape.is_pull_combine = is_pull_combine
        shape.is_mxfp8 = is_mxfp8
        shape.has_backward = kind != "forward"
        self.kind = kind
        self.generation = generation
        self.native = self._make_memory()

    def _make_memory(self) -> Any:
        raise NotImplementedError

    def region(self, rank: int, name: str, width: int) -> Tensor:
        """A region of a rank as bfloat16 [rows, width], shared with the kernel."""
        raise NotImplementedError

    def floats(self, rank: int, name: str) -> Tensor:
        """A region of a rank that holds float32, flat, shared with the kernel."""
        return self.region(rank, name, 2).view(torch.float32).flatten()

    def fill(self, rank: int, name: str, rows: Tensor) -> None:
        """Writes `rows` to the start of a region."""
        self.region(rank, name, rows.shape[1])[: len(rows)] = rows.detach()

    def launch(
        self, tensors: Sequence[Mapping[str, Tensor]] | None = None, swiglu_limit: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """Runs the kernel on all ranks, with every rank's `tensors` by the names of csrc/call.h (contiguous).

        Returns the statistics of the stage by rank. Raises MoKTimeoutError (MoKDeadlockError on fibers) if the stage
        waits for something after all.
        """
        raise NotImplementedError

    def _programs(self, tensors: Sequence[Mapping[str, Tensor]] | None, swiglu_limit: float | None) -> list[Any]:
        programs = []
        for rank, tables in enumerate(self.tables):
            program = extension().Program(
                self.kind,
                self.shape,
                rank,
                self.num_tokens[rank],
                0,
                list(Plan.parse("split").group_masks),
                _pointers(tables),
                _pointers(tensors[rank] if tensors else {}),
                swiglu_limit,
            )
            mask = group_mask((self.stage,))
            num_workers = self.group.num_workers
            program.add_launch(self.stage, mask, self.stage, self.generation, False, False, False, 0, num_workers, 0)
            programs.append(program)
        return programs


def _pointers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}
