"""The launches of a call on a GPU: which stream each goes to, and which share the processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.plan import Launch
from mok_modular.targets.cuda.grid import Share, is_shared


@dataclass(frozen=True)
class GpuLaunch:
    """A launch of a call.

    is_last: it also waits for the side stream. share: which SMs it gets. num_comm_ctas: CTAs that only communicate,
    where the kernel holds both kinds of tasks. has_experts_in_turn: see `Launch` in csrc/layout.h.
    """

    launch: Launch
    is_on_side: bool
    is_last: bool
    share: Share
    num_comm_ctas: int
    has_experts_in_turn: bool


def has_side_stream(config: MoKConfig, kind: str, num_sms: int) -> bool:
    """Whether copies go to a stream of their own: where they have some of the `num_sms` SMs for themselves."""
    return is_shared(num_sms, config.fwd_num_comm_sms) and kind == "forward" and not config.plan.is_fused


def in_streams(config: MoKConfig, kind: str, in_order: Sequence[Launch], num_sms: int) -> list[GpuLaunch]:
    """Two streams where communication has SMs of its own, else one. On each, launches are in data-flow order: a kernel
    waits only for kernels launched before it, so any serialisation of the two is right as well.

    num_sms: SMs that are not reserved.
    """
    has_side = has_side_stream(config, kind, num_sms)
    return [
        GpuLaunch(
            launch,
            is_on_side=has_side and launch.stream == "comm",
            is_last=launch.kernel == "reduce",
            share=launch.stream if has_side and launch.kernel != "reduce" else "all",
            num_comm_ctas=config.fwd_num_comm_sms or 0,
            # Where nothing runs beside it, a dispatch is over before its rows are used: any order will do.
            has_experts_in_turn=not has_side and launch.stages == ("dispatch",) and config.dispatch == "pull",
        )
        for launch in in_order
    ]
