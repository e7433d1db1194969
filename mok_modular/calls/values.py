"""What calls take and return: schedules, contexts and weights by name, and empty ones to be filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.extension import extension

ROUTED_WEIGHTS = ("w_routed_gate", "w_routed_up", "w_routed_down")


SHARED_WEIGHTS = ("w_shared_gate", "w_shared_up", "w_shared_down")


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """Where every row comes from and goes to; int32 tensors. C rows of capacity, El local experts.

    peer_rank, peer_token_idx [C]: source rank and flat route token*K+k of a row; -1 in padding and beyond.
    segment_start [El+1], segment_num_rows [El]: rows of each local expert, with and without padding.
    row_block_expert [C / row_block]: local expert of a row block.
    window_start, generation_window: the order of work: row blocks of each window, windows of each macrobatch.
    counts [5]: rows, windows, routes of this rank, rows wanted, number of the build.
    route_rank, route_row [T*K]: owner and row there of this rank's own routes; -1 for none.
    sorted_route [T*K]: own routes by expert, the order in which a pusher sends them.
    token_row [R*n]: first row here of each peer's token that comes here, n the workspace's num_local_tokens when the
    schedule was built; with dispatch="pull_once", else empty.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    segment_start: Tensor
    segment_num_rows: Tensor
    row_block_expert: Tensor
    window_start: Tensor
    generation_window: Tensor
    counts: Tensor
    route_rank: Tensor
    route_row: Tensor
    sorted_route: Tensor
    token_row: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return dict(vars(self))

    @property
    def num_rows(self) -> int:
        """Rows of this rank, padding included. Synchronises on a GPU."""
        return int(self.counts[0])


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """What backward needs of macrobatch 0: x [M, H], gate and up [M, I], M rows of the ring, bf16; and of the shared
    expert: shared_gate and shared_up [T, S]. Absent tensors are empty."""

    x: Tensor
    gate: Tensor
    up: Tensor
    shared_gate: Tensor
    shared_up: Tensor


def schedule_fields(schedule: Any) -> tuple[Any, ...]:
    """The tensors of a schedule; an object that is none makes `call_key` return None."""
    return tuple(vars(schedule).values()) if isinstance(schedule, MoKSchedule) else (schedule,)


def named_weights(*weights: Any) -> dict[str, Any]:
    """The six weights by name, given in the order of `forward`: the shared expert's gate, up and down, then routed."""
    return dict(zip((*SHARED_WEIGHTS, *ROUTED_WEIGHTS), weights, strict=True))


def context_tensors(context: MoKForwardContext) -> dict[str, Tensor]:
    """The fields of a context by the names of csrc/call.h."""
    return {f"context_{name}": tensor for name, tensor in vars(context).items()}


def schedule_sizes(shape: Any, num_routes: int) -> dict[str, int]:
    return {
        "peer_rank": shape.capacity_rows,
        "peer_token_idx": shape.capacity_rows,
        "segment_start": shape.num_local_experts + 1,
        "segment_num_rows": shape.num_local_experts,
        "row_block_expert": shape.capacity_rows // shape.row_block,
        "window_start": shape.max_windows + 1,
        "generation_window": shape.max_generations + 1,
        "counts": extension().num_counts(),
        "route_rank": num_routes,
        "route_row": num_routes,
        "sorted_route": num_routes,
        "token_row": shape.num_ranks * shape.max_tokens if shape.is_pull_once else 0,
    }


def empty_schedule(sizes: Mapping[str, int], device: torch.device) -> MoKSchedule:
    """A schedule of these sizes. Its tensors share no memory: what an operator returns must not."""
    return MoKSchedule(**{name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()})


def empty_context(x: Tensor, num_rows: int, intermediate_size: int, shared_size: int) -> MoKForwardContext:
    hidden_size, num_tokens = x.shape[1], x.shape[0] if num_rows else 0
    return MoKForwardContext(
        x=x.new_empty(num_rows, hidden_size),
        gate=x.new_empty(num_rows, intermediate_size),
        up=x.new_empty(num_rows, intermediate_size),
        shared_gate=x.new_empty(num_tokens, shared_size),
        shared_up=x.new_empty(num_tokens, shared_size),
    )
