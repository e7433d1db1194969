"""What the workspaces of all targets share: sizes, failure, statistics, and the programs of calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.call import Call, has_both_roles, kernel_arguments, launches
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.extension import extension
from mok_modular.protocol.plan import Launch, group_mask
from mok_modular.protocol.sizes import Sizes
from mok_modular.protocol.trace import Trace
from mok_modular.swap import Swap

planted_faults: list[dict[str, Any]] = []
"""What mok_modular.testing.faults has planted in every run of this process."""


class SharedWorkspace:
    """The memory of a group and the state that its ranks share. `native` is the target's memory."""

    trace: Trace

    def __init__(self, group: Any, config: MoKConfig, num_local_tokens: int, hidden_size: int, topk: int) -> None:
        self.group = group
        self.config = config
        self.num_local_tokens = num_local_tokens
        self.hidden_size = hidden_size
        self.topk = topk
        self.num_ranks = group.size()
        self.native = self._make_memory()
        self.stats: list[dict[tuple[str, str, str], dict[str, Any]]] = [{} for _ in range(group.size())]
        self.failure: Exception | None = None
        self.clear_trace()
        self.has_backward = False  # from the first backward on: room for it
        group.on_interrupt(self)
        self._reserve(self._smallest_shape())

    # ---- each target's own ----

    def _make_memory(self) -> Any:
        raise NotImplementedError

    def region(self, rank: int, name: str, dtype: torch.dtype) -> Tensor:
        """A region of a rank's memory as a flat tensor; valid until the workspace grows."""
        raise NotImplementedError

    def clear_trace(self) -> None:
        """Starts the trace anew."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Ends a running call (Ctrl-C)."""
        raise NotImplementedError

    def reset(self) -> list[None]:
        """New epochs for all ranks."""
        raise NotImplementedError

    def run(self, calls: Sequence[Call]) -> Sequence[BaseException | None]:
        """Runs or enqueues one call of every rank; returns what each rank must raise, or None."""
        raise NotImplementedError

    # ---- of all targets ----

    @property
    def key(self) -> Any:
        """Which of the group's workspaces this is, for a comparison between ranks."""
        return id(self)

    def tell_peers(self, name: str, error: Exception) -> None:
        """A rank cannot make its part of a call. Nothing to do where all ranks meet for it."""

    @property
    def row_block(self) -> int:
        """Rows of the unit of padding and signals."""
        return self.sizes.row_block

    @property
    def sizes(self) -> Sizes:
        """What the sizes of a call follow from."""
        return Sizes(self.config, self.num_ranks, self.num_local_tokens, self.hidden_size, self.topk)

    def capacity_rows(self, num_local_experts: int) -> int:
        """Rows that a rank's schedule has room for."""
        return self.sizes.capacity_rows(num_local_experts)

    def shape(self, num_local_experts: int, capacity_rows: int, intermediate_size: int, shared_size: int = 0) -> Any:
        """The Shape of csrc/layout.h for a call."""
        return self.sizes.shape(num_local_experts, capacity_rows, intermediate_size, shared_size, self.has_backward)

    def _smallest_shape(self) -> Any:
        return self.shape(num_local_experts=1, capacity_rows=self.row_block, intermediate_size=64)

    def _reserve(self, shape: Any, call: Call | None = None) -> None:
        """Makes every region large enough for `shape`, that of a call if one is given.

        Raises MemoryError (torch.OutOfMemoryError on a GPU) with the bytes and the arguments that ask for them; the
        workspace is what it was then.
        """
        try:
            self.native.reserve(shape)
        except (MemoryError, torch.OutOfMemoryError) as error:
            text = self.sizes.explain_memory(shape, is_of_call=call is not None)
            reason = str(error).partition("\n")[0]
            raise type(error)(text if reason == "std::bad_alloc" else f"{text} ({reason})") from error

    def grow(self, num_tokens: int) -> None:
        """Room for more tokens a rank; regions move, and none holds anything between calls."""
        old = self.num_local_tokens
        if num_tokens <= old:
            return
        self.num_local_tokens = num_tokens
        try:
            self._reserve(self._smallest_shape())
        except BaseException:
            self.num_local_tokens = old
            raise

    def read_trace(self) -> Trace:
        """What traced calls have recorded so far."""
        return self.trace

    def check(self) -> None:
        """Raises the failure that no reset has followed."""
        if self.failure is not None:
            raise copy.copy(self.failure)  # every rank's own: notes and tracebacks do not mix

    def _program(self, rank: int, call: Call, shape: Any, swap: Swap | None = None) -> Any:
        in_order = launches(call, shape)
        program = extension().Program(
            call.kind,
            shape,
            rank,
            call.num_tokens,
            call.fingerprint(),
            [group_mask(launch.stages) for launch in in_order],
            {name: tensor.data_ptr() for name, tensor in call.schedule.items() if tensor.numel()},
            {name: tensor.data_ptr() for name, tensor in call.tensors.items() if tensor.numel()},
            call.swiglu_limit,
            call.schedule["token_row"].numel() // self.num_ranks if call.schedule else 0,
        )
        for launch, arguments in zip(in_order, kernel_arguments(in_order), strict=True):
            num_workers, num_comm_workers = self._num_workers(call, launch)
            swapped = swap.function(rank, launch.stages, launch.generation) if swap else None
            if swapped is not None:
                num_workers, num_comm_workers = 1, 0
            program.add_launch(*astuple(arguments), num_workers, num_comm_workers, swapped)
        return program

    def _num_workers(self, call: Call, launch: Launch) -> tuple[int, int]:
        """Workers of a kernel: (compute, communication). Roles part only where a kernel holds both kinds of
        tasks; a single worker draws both from one sequence."""
        num_comm_workers = call.config.bwd_num_comm_sms if call.is_backward else call.config.fwd_num_comm_sms
        if num_comm_workers is None:
            num_comm_workers = self.group.num_workers // 2
        if not has_both_roles(launch, is_pull_combine=self.config.combine == "pull"):
            num_comm_workers = 0
        return self.group.num_workers, num_comm_workers
