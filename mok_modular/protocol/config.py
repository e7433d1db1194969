"""How a layer runs (`MoKConfig`).

Only options whose feature exists are here; an unknown keyword is a TypeError, as for any dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mok_modular.protocol.checks import check_choice, check_int, check_number
from mok_modular.protocol.plan import Plan
from mok_modular.protocol.swap_rules import check_stages

DEFAULT_ROW_BLOCK = 128
"""The smallest row block of any target: what minibatch_size is held against while `row_block` is None."""


@dataclass(frozen=True)
class MoKConfig:
    """The choices of one layer or call. Every rank of a group must use equal ones.

    mode: `fused`, `split`, or a plan string such as `dispatch|gate_up+swiglu|down+combine`.
    minibatch_size: rows of a work window and of a ring slot; a multiple of the row block. On a GPU about four tiles of
        gate_up (128 rows, 128 columns) for every SM are best: 4096 from a width of 2048 up, 8192 at 1024.
    macrobatch_size: rows of the ring, a multiple of minibatch_size (equal allowed). The ring is never larger
        than the worst case needs.
    fwd_num_comm_sms, bwd_num_comm_sms: processors kept for communication; None lets the target choose.
    schedule_capacity_multiplier: rows that a rank can receive, as a multiple of its share under even routing;
        None is the worst case, which cannot overflow.
    all_gather_top_experts_chunk_bytes: accepted for call compatibility, unused.
    dispatch: `pull` (the expert's rank reads, a row for every route), `pull_once` (a token that several experts of a
        rank want crosses the link once and is copied there; BF16) or `push`. combine: `push` (the expert's rank writes)
        or `pull`. All but pull dispatch and push combine need a ring that holds all rows.
    wire: how tokens and their gradients travel in MXFP8 layers, `bf16` or `mxfp8` (quantized once, at the source; half
        the bytes). The same bits; BF16 layers take `bf16` only, and so does push dispatch, which writes BF16 rings.
    signal_grain: what one signal stands for, `row_block` or `minibatch`.
    ring: order of windows inside a generation, `interleaved` or `serial`.
    row_block: rows of the unit of padding and signals, 128 or 256; None takes the target's.
    start_timeout_s, timeout_s: how long a wait for a peer's entry, and a later wait, may last; 0: for ever.
    num_reserved_sms: processors left to other kernels.
    allow_shared_gpu: ranks that are processes may share a GPU, for tests: it is time-sliced between them, so a round
        of signals takes milliseconds, and timeouts are multiplied by the number of ranks on a GPU.
    stages: functions that stand in for stages, by name (mok_modular.swap); host target.
    trace: keep what every worker did and when, for `workspace.trace()`. On a GPU such calls use kernels of their own,
        compiled at the first one, and a buffer of 64 MiB; they cannot be captured in a CUDA graph.
    signals: how ranks that are processes signal each other in kernels without matrix products: `direct` (a store to the
        peer's address) or `nvshmem` (NVSHMEM's device operations). Kernels with matrix products always use `direct`.

    Raises TypeError or ValueError that names the argument, the value and the rule.
    """

    mode: str = "fused"
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    fwd_num_comm_sms: int | None = None
    bwd_num_comm_sms: int | None = None
    schedule_capacity_multiplier: float | None = None
    all_gather_top_experts_chunk_bytes: int = 2048
    dispatch: str = "pull"
    combine: str = "push"
    wire: str = "bf16"
    signal_grain: str = "row_block"
    ring: str = "interleaved"
    row_block: int | None = None
    start_timeout_s: float = 300
    timeout_s: float = 10
    num_reserved_sms: int = 0
    allow_shared_gpu: bool = False
    trace: bool = False
    stages: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    signals: str = "direct"

    def __post_init__(self) -> None:
        self._check_mode()
        check_choice("dispatch", self.dispatch, ("pull", "pull_once", "push"))
        check_choice("combine", self.combine, ("push", "pull"))
        check_choice("wire", self.wire, ("bf16", "mxfp8"))
        if self.wire == "mxfp8" and self.dispatch == "pull_once":
            raise ValueError("dispatch='pull_once' is for BF16 layers: wire must be 'bf16', got 'mxfp8'")
        if self.wire == "mxfp8" and self.dispatch == "push":
            raise ValueError("wire='mxfp8' needs dispatch='pull': a pusher writes the owner's ring, which holds BF16")
        check_choice("signal_grain", self.signal_grain, ("row_block", "minibatch"))
        check_choice("ring", self.ring, ("interleaved", "serial"))
        self._check_sizes()
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        if self.schedule_capacity_multiplier is not None:
            check_number("schedule_capacity_multiplier", self.schedule_capacity_multiplier)
            if self.schedule_capacity_multiplier <= 0:
                raise ValueError(
                    "schedule_capacity_multiplier must be above 0, or None for the worst case, "
                    f"got {self.schedule_capacity_multiplier}"
                )
        check_int("all_gather_top_experts_chunk_bytes", self.all_gather_top_experts_chunk_bytes, minimum=1)
        for name in ("start_timeout_s", "timeout_s"):
            check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0 (0 waits for ever), got {getattr(self, name)}")
        check_int("num_reserved_sms", self.num_reserved_sms, minimum=0)
        for name in ("allow_shared_gpu", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        check_stages(
            self.stages,
            self.plan,
            is_push_dispatch=self.dispatch == "push",
            is_pull_combine=self.combine == "pull",
        )
        object.__setattr__(self, "stages", dict(self.stages))  # what becomes of the caller's own is no change here
        check_choice("signals", self.signals, ("direct", "nvshmem"))

    @property
    def plan(self) -> Plan:
        """`mode` as a plan."""
        return Plan.parse(self.mode)

    def _check_mode(self) -> None:
        if not isinstance(self.mode, str):
            raise TypeError(f"mode must be a str, got {type(self.mode).__name__}")
        try:
            Plan.parse(self.mode)
        except ValueError as error:
            raise ValueError(f"mode: {error}") from None

    def _check_sizes(self) -> None:
        if self.row_block is not None:
            check_int("row_block", self.row_block, minimum=1)
            if self.row_block not in (128, 256):
                raise ValueError(f"row_block must be 128, 256 or None (the target's), got {self.row_block}")
        check_int("minibatch_size", self.minibatch_size, minimum=1)
        check_int("macrobatch_size", self.macrobatch_size, minimum=1)
        if self.macrobatch_size >= 2**31:
            raise ValueError(f"macrobatch_size must be below 2147483648, got {self.macrobatch_size}")
        row_block = self.row_block or DEFAULT_ROW_BLOCK
        if self.minibatch_size % row_block != 0:
            raise ValueError(
                f"minibatch_size must be a multiple of the row block ({row_block}), got {self.minibatch_size}"
            )
        if self.macrobatch_size % self.minibatch_size != 0:
            raise ValueError(
                f"macrobatch_size must be a multiple of minibatch_size ({self.minibatch_size}), "
                f"got {self.macrobatch_size}"
            )
