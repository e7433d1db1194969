"""What the sizes of a workspace and of its calls follow from, asked of the compiled layout (csrc/layout.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mok_modular.protocol.config import DEFAULT_ROW_BLOCK, MoKConfig
from mok_modular.protocol.extension import extension

NUM_COLUMNS = 32
"""Columns of h that make one partial sum of d_router."""


def is_ring_region(name: str) -> bool:
    """Whether a region holds rows, which macrobatch_size bounds."""
    return name.startswith("ring_") or name == "router_partials"


@dataclass(frozen=True)
class Sizes:
    """What the sizes of a workspace and of the calls on it follow from."""

    config: MoKConfig
    num_ranks: int
    num_local_tokens: int
    hidden_size: int
    topk: int

    @property
    def row_block(self) -> int:
        """Rows of the unit of padding and signals."""
        return self.config.row_block or DEFAULT_ROW_BLOCK

    def capacity_rows(self, num_local_experts: int) -> int:
        """Rows that a rank's schedule has room for, padding included: the worst case, or as configured."""
        num_routes = self.num_ranks * self.num_local_tokens * self.topk
        multiplier = self.config.schedule_capacity_multiplier
        if multiplier is not None:
            num_routes = min(num_routes, -int(-multiplier * self.num_local_tokens * self.topk // 1))
        rows = extension().worst_case_rows(num_routes, num_local_experts, self.row_block)
        return max(rows, self.row_block)

    def explain_memory(self, shape: Any, *, is_of_call: bool) -> str:
        """Why there is no memory for a shape: bytes, and the arguments that ask for them. `is_of_call`: else only the
        sizes of the workspace are known yet."""
        regions = shape.region_bytes()
        total, ring = sum(regions.values()), sum(size for name, size in regions.items() if is_ring_region(name))
        ranks = "1 rank" if self.num_ranks == 1 else f"each of {self.num_ranks} ranks"
        text = f"out of memory: a workspace for num_local_tokens={self.num_local_tokens}, "
        text += f"hidden_size={self.hidden_size}, topk={self.topk} needs {total:,} bytes on {ranks}"
        inner, experts, shared = "I", "E", "S"
        if is_of_call:
            inner, experts, shared = map(str, (shape.intermediate_size, shape.num_experts, shape.shared_size))
            text += (
                f", of which {ring:,} hold the ring of macrobatch_size={self.config.macrobatch_size} rows "
                f"({shape.ring_rows} here) with intermediate_size={inner}"
            )
        return (
            f"{text}; smaller ones need less: mok-modular doctor --shape "
            f"{self.hidden_size},{inner},{experts},{self.topk},{shared} --ranks {self.num_ranks} --tokens "
            f"{self.num_local_tokens} prints what a layer needs"
        )

    def shape(
        self,
        num_local_experts: int,
        capacity_rows: int,
        intermediate_size: int,
        shared_size: int,
        has_backward: bool,
    ) -> Any:
        """The Shape of csrc/layout.h for a call."""
        config = self.config
        shape = extension().Shape()
        shape.num_ranks = self.num_ranks
        shape.max_tokens = self.num_local_tokens
        shape.topk = self.topk
        shape.hidden_size = self.hidden_size
        shape.intermediate_size = intermediate_size
        shape.shared_size = shared_size
        shape.num_local_experts = num_local_experts
        shape.row_block = self.row_block
        shape.minibatch = config.minibatch_size
        shape.capacity_rows = capacity_rows
        shape.ring_rows = min(config.macrobatch_size, capacity_rows)
        shape.is_push_dispatch = config.dispatch == "push"
        shape.is_pull_once = config.dispatch == "pull_once"
        shape.is_pull_combine = config.combine == "pull"
        shape.is_minibatch_grain = config.signal_grain == "minibatch"
        shape.is_serial_ring = config.ring == "serial"
        shape.is_mxfp8_wire = config.wire == "mxfp8"
        shape.has_backward = has_backward
        return shape
