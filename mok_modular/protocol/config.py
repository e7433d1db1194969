"""How a layer runs (`MoKConfig`) and how large it is (`MoEShape`).

Only options whose feature exists are here; an unknown keyword is a TypeError, as for any dataclass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mok_modular.protocol.plan import Plan
from mok_modular.protocol.swap_rules import check_stages

DEFAULT_ROW_BLOCK = 128
"""The smallest row block of any target: what minibatch_size is held against while `row_block` is None."""

MAX_TOPK = 64


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
        _check_choice("dispatch", self.dispatch, ("pull", "pull_once", "push"))
        _check_choice("combine", self.combine, ("push", "pull"))
        _check_choice("wire", self.wire, ("bf16", "mxfp8"))
        if self.wire == "mxfp8" and self.dispatch == "pull_once":
            raise ValueError("dispatch='pull_once' is for BF16 layers: wire must be 'bf16', got 'mxfp8'")
        if self.wire == "mxfp8" and self.dispatch == "push":
            raise ValueError("wire='mxfp8' needs dispatch='pull': a pusher writes the owner's ring, which holds BF16")
        _check_choice("signal_grain", self.signal_grain, ("row_block", "minibatch"))
        _check_choice("ring", self.ring, ("interleaved", "serial"))
        self._check_sizes()
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum=1)
        if self.schedule_capacity_multiplier is not None:
            _check_number("schedule_capacity_multiplier", self.schedule_capacity_multiplier)
            if self.schedule_capacity_multiplier <= 0:
                raise ValueError(
                    "schedule_capacity_multiplier must be above 0, or None for the worst case, "
                    f"got {self.schedule_capacity_multiplier}"
                )
        _check_int("all_gather_top_experts_chunk_bytes", self.all_gather_top_experts_chunk_bytes, minimum=1)
        for name in ("start_timeout_s", "timeout_s"):
            _check_number(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0 (0 waits for ever), got {getattr(self, name)}")
        _check_int("num_reserved_sms", self.num_reserved_sms, minimum=0)
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
        _check_choice("signals", self.signals, ("direct", "nvshmem"))

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
            _check_int("row_block", self.row_block, minimum=1)
            if self.row_block not in (128, 256):
                raise ValueError(f"row_block must be 128, 256 or None (the target's), got {self.row_block}")
        _check_int("minibatch_size", self.minibatch_size, minimum=1)
        _check_int("macrobatch_size", self.macrobatch_size, minimum=1)
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


@dataclass(frozen=True)
class MoEShape:
    """The sizes of a layer: H, I, E, K and S (0 without a shared expert).

    Raises TypeError or ValueError that names the field, the value and the rule.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {type(self.name).__name__}")
        for name, minimum in (
            ("hidden_size", 64),
            ("intermediate_size", 64),
            ("num_experts", 1),
            ("topk", 1),
            ("shared_intermediate_size", 0),
        ):
            _check_int(name, getattr(self, name), minimum=minimum)
        for name in ("hidden_size", "intermediate_size", "shared_intermediate_size"):
            if getattr(self, name) % 64 != 0:
                raise ValueError(f"{name} must be a multiple of 64, got {getattr(self, name)}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"topk must be 1..{MAX_TOPK}, got {self.topk}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_int(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} ({value!r})")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be an int or a float, got {type(value).__name__} ({value!r})")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


PRESETS: dict[str, MoEShape] = {
    shape.name: shape
    for shape in (
        # E, K and S as published for Kimi K2, of which K2.7 is assumed to keep the MoE layer.
        MoEShape("kimi-k2.7", 7168, 2048, num_experts=384, topk=8, shared_intermediate_size=2048),
        # E 256, K 8 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("glm-5.2", 6144, 2048, num_experts=256, topk=8, shared_intermediate_size=2048),
        # E 512, K 10 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("qwen3.5-397b", 4096, 1024, num_experts=512, topk=10, shared_intermediate_size=1024),
        # E 384, K 6 and 1 shared expert as published; the shared width is assumed to be a routed expert's.
        MoEShape("deepseek-v4-pro", 7168, 3072, num_experts=384, topk=6, shared_intermediate_size=3072),
        MoEShape("tiny", 256, 384, num_experts=16, topk=4, shared_intermediate_size=128),
    )
}
"""Shapes of known models by name, and `tiny`, which runs on any laptop."""
