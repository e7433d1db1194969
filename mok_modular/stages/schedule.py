"""Schedule: from every rank's top-k expert ids to the table of rows that a rank computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_modular import functional
from mok_modular.functional import MoKSchedule
from mok_modular.protocol.config import MoKConfig
from mok_modular.ranks.group import LocalGroup, LocalMember


@dataclass(frozen=True, eq=False)
class ScheduleTables:
    """What one rank needs to know. All tensors are int32; -1 marks a padding row or a route to no expert.

    As the owner of El = E/R experts, over its ``num_rows`` rows:

    - ``peer_rank`` [num_rows]: the rank whose token the row holds;
    - ``peer_token_idx`` [num_rows]: the flat route index ``token*K + k`` on that rank;
    - ``segment_start`` [El+1]: first row of each local expert, a multiple of row_block; the last is num_rows;
    - ``segment_num_rows`` [El]: rows of each local expert without padding;
    - ``row_block_expert`` [num_rows/row_block]: the local expert (0..El-1) of each row block.

    As a source of tokens, over its ``T*K`` routes:

    - ``route_rank`` [T*K]: the rank that owns the route's expert;
    - ``route_row`` [T*K]: the route's row in that owner's table.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    segment_start: Tensor
    segment_num_rows: Tensor
    row_block_expert: Tensor
    route_rank: Tensor
    route_row: Tensor


def reference(top_experts: Sequence[Tensor], *, num_experts: int, row_block: int = 128) -> list[ScheduleTables]:
    """Builds every rank's tables: whose token each of its rows holds, and where each of its own routes goes.

    ``top_experts`` holds one int32 or int64 tensor [T_r, K] per rank; T_r may differ and may be 0. An id is
    -1 (no route) or an expert in 0..num_experts-1; a token may name an expert twice. Expert e lives on rank
    ``e // (E/R)``.

    Rows come expert by expert. Inside an expert come the first route of rank 0, of rank 1, ..., then the
    second of each, and so on (routes of a rank counted in flat order ``token*K + k``, ranks that have no more
    are skipped), so that an owner reads from all peers in turn. Each expert's rows are padded to whole row
    blocks; an expert without rows gets an empty segment.

    Raises TypeError for ids of another dtype; ValueError for wrong shapes, for E not divisible by R, for a
    row_block below 1 and for ids out of range (with their count).
    """
    num_ranks = len(top_experts)
    _check(top_experts, num_experts, row_block)
    num_local_experts = num_experts // num_ranks
    device = top_experts[0].device

    # All routes of all ranks: the expert, the rank and the flat index on that rank.
    expert = torch.cat([ids.reshape(-1).long() for ids in top_experts])
    src_rank = torch.cat([torch.full((ids.numel(),), r, device=device) for r, ids in enumerate(top_experts)])
    route_idx = torch.cat([torch.arange(ids.numel(), device=device) for ids in top_experts])
    is_route = expert >= 0
    expert, src_rank, route_idx = expert[is_route], src_rank[is_route], route_idx[is_route]

    # turn: how many routes of the same rank to the same expert come before; slot: how many of all ranks.
    turn = _position_in_group(expert * num_ranks + src_rank, num_experts * num_ranks)
    order = torch.argsort(turn * num_ranks + src_rank, stable=True)
    slot = torch.empty_like(order)
    slot[order] = _position_in_group(expert[order], num_experts)

    # Segments [R, El+1], on every owner from its row 0.
    num_rows = torch.bincount(expert, minlength=num_experts).view(num_ranks, num_local_experts)
    num_blocks = (num_rows + row_block - 1) // row_block
    segment_start = torch.nn.functional.pad((num_blocks * row_block).cumsum(1), (1, 0))
    owner = expert // num_local_experts
    row = segment_start[:, :-1].reshape(-1)[expert] + slot

    def table(size: int, idx: Tensor, value: Tensor) -> Tensor:
        filled = torch.full((size,), -1, dtype=torch.int32, device=device)
        filled[idx] = value.int()
        return filled

    local_experts = torch.arange(num_local_experts, dtype=torch.int32, device=device)
    tables = []
    for rank in range(num_ranks):
        owned, sent = owner == rank, src_rank == rank
        num_owned_rows, num_routes = int(segment_start[rank, -1]), top_experts[rank].numel()
        tables.append(
            ScheduleTables(
                peer_rank=table(num_owned_rows, row[owned], src_rank[owned]),
                peer_token_idx=table(num_owned_rows, row[owned], route_idx[owned]),
                segment_start=segment_start[rank].int(),
                segment_num_rows=num_rows[rank].int(),
                row_block_expert=local_experts.repeat_interleave(num_blocks[rank]),
                route_rank=table(num_routes, route_idx[sent], owner[sent]),
                route_row=table(num_routes, route_idx[sent], row[sent]),
            )
        )
    return tables


def launch(
    top_experts: Sequence[Tensor],
    *,
    num_experts: int,
    row_block: int = 128,
    config: MoKConfig | None = None,
    group: LocalGroup | None = None,
) -> list[MoKSchedule]:
    """``reference`` by the compiled stage: the whole exchange through the protocol, on the ranks of ``group`` (a
    fresh LocalGroup if None). A MoKSchedule holds more than a ScheduleTables: rows of -1 up to the capacity, and
    the windows of the work, by ``config`` (its row block is ``row_block``).

    Raises what ``reference`` raises, and ValueError for a row block that is not 128 or 256, for more rows than
    ``config`` leaves room for and for a group of another size.
    """
    _check(top_experts, num_experts, row_block)
    num_ranks, topk = len(top_experts), top_experts[0].shape[1]
    device = top_experts[0].device
    # Which plan counts for nothing here, but a GPU does not have kernels for all of them.
    config = dataclasses.replace(
        config or MoKConfig(mode="split" if device.type == "cuda" else "fused"), row_block=row_block
    )
    group = group or LocalGroup(num_ranks, device="cpu" if device.type == "cpu" else str(device))
    if group.size() != num_ranks:
        raise ValueError(f"group has {group.size()} ranks, top_experts is for {num_ranks}")
    num_local_tokens = max(len(ids) for ids in top_experts)

    def build(member: LocalMember) -> MoKSchedule:
        workspace = functional.create_workspace(
            config, member, num_local_tokens=num_local_tokens, hidden_size=64, topk=topk
        )
        ids = top_experts[member.rank()].contiguous()
        return functional.build_schedule(workspace, config, ids, num_local_experts=num_experts // num_ranks)

    return group.run(build)


def _position_in_group(group: Tensor, num_groups: int) -> Tensor:
    """For each element, how many earlier elements have the same group."""
    order = torch.argsort(group, stable=True)
    num_members = torch.bincount(group, minlength=num_groups)
    group_start = num_members.cumsum(0) - num_members
    position = torch.empty_like(order)
    position[order] = torch.arange(len(group), device=group.device) - group_start[group[order]]
    return position


def _check(top_experts: Sequence[Tensor], num_experts: int, row_block: int) -> None:
    num_ranks = len(top_experts)
    if num_ranks == 0:
        raise ValueError("top_experts is empty; it needs one tensor [T, K] per rank")
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(f"num_experts={num_experts} must be a positive multiple of the number of ranks, {num_ranks}")
    if row_block < 1:
        raise ValueError(f"row_block={row_block} must be at least 1")
    for r, ids in enumerate(top_experts):
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"top_experts of rank {r} has dtype {ids.dtype}; it must be torch.int32 or torch.int64")
        if ids.dim() != 2 or ids.shape[1] != top_experts[0].shape[-1]:
            shapes = [tuple(t.shape) for t in top_experts]
            raise ValueError(f"top_experts must be [T, K] with one K on all ranks, not {shapes}")
        if ids.device.type not in ("cpu", "cuda") or ids.device != top_experts[0].device:
            devices = ", ".join(str(t.device) for t in top_experts)
            raise ValueError(f"top_experts must be on the CPU or on one GPU for all ranks, got {devices}")
        num_wrong = int(((ids < -1) | (ids >= num_experts)).sum())
        if num_wrong:
            raise ValueError(
                f"top_experts of rank {r} holds {num_wrong} ids out of range; they must be -1 (no route) "
                f"or in 0..{num_experts - 1}"
            )
