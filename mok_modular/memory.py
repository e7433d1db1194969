"""What a layer needs, before anything is allocated: one rank's bytes of a workspace, and of what calls return.

    estimate(PRESETS["kimi-k2.7"], MoKConfig(), num_ranks=64, num_tokens=4096).ring

Sizes of regions come from csrc/layout.h, as those of a workspace do; docs/memory.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from mok_modular.calls.values import empty_context, empty_schedule, schedule_sizes
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.shapes import MoEShape
from mok_modular.protocol.sizes import Sizes, is_ring_region

_META = torch.device("meta")  # sizes without memory


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `regions`: the workspace, by region; one workspace serves all layers of the same H and K.
    `schedule`: what build_schedule returns. `context`: what a forward keeps for its backward, once for every forward
    that is in flight."""

    regions: dict[str, int]
    schedule: int
    context: int

    @property
    def workspace(self) -> int:
        """All regions."""
        return sum(self.regions.values())

    @property
    def ring(self) -> int:
        """The regions that hold rows, which macrobatch_size bounds."""
        return sum(size for name, size in self.regions.items() if is_ring_region(name))

    @property
    def carry(self) -> int:
        """Weight gradients on their way from one macrobatch to the next; 0 where the ring holds all rows."""
        return self.regions["carry"]

    def to_json(self) -> dict[str, int]:
        """Totals and parts by name."""
        parts = {"workspace": self.workspace, "ring": self.ring, "carry": self.carry}
        return {**parts, "schedule": self.schedule, "context": self.context}


def estimate(
    shape: MoEShape, config: MoKConfig, *, num_ranks: int, num_tokens: int, has_backward: bool = True
) -> Memory:
    """The memory of a layer on `num_ranks` ranks with up to `num_tokens` tokens each.

    has_backward: a workspace has room for a backward from the first one on; without gradients there is neither that
    nor a context. Raises ValueError for E not divisible by the number of ranks and for 2^31 rows or more; ImportError
    where the extension does not load.
    """
    if num_ranks < 1 or shape.num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be divisible by the number of ranks, got {shape.num_experts} experts on "
            f"{num_ranks} ranks"
        )
    num_local_experts = shape.num_experts // num_ranks
    sizes = Sizes(config, num_ranks, num_tokens, shape.hidden_size, shape.topk)
    capacity_rows = sizes.capacity_rows(num_local_experts)
    if capacity_rows >= 2**31:
        raise ValueError(
            f"num_tokens must leave room for fewer than 2147483648 rows, got {num_tokens}: {capacity_rows} rows with "
            f"top-{shape.topk} on {num_ranks} ranks"
        )
    layout = sizes.shape(
        num_local_experts,
        capacity_rows,
        shape.intermediate_size,
        shape.shared_intermediate_size,
        has_backward,
    )
    x = torch.empty(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=_META)
    num_rows = layout.ring_rows if has_backward else 0
    context = empty_context(x, num_rows, shape.intermediate_size, shape.shared_intermediate_size)
    schedule = empty_schedule(schedule_sizes(layout, num_tokens * shape.topk), _META)
    return Memory(
        regions=dict(layout.region_bytes()),
        schedule=sum(tensor.nbytes for tensor in schedule.tensors().values()),
        context=sum(getattr(context, item.name).nbytes for item in fields(context)),
    )
