"""Workspaces: the symmetric memory, rings and signals that the calls of a group run on.

Sizes and names come from csrc/layout.h; nothing here computes an address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from mok_modular.protocol.checks import is_same_device
from mok_modular.protocol.config import MoKConfig
from mok_modular.protocol.shapes import MAX_TOPK
from mok_modular.protocol.trace import Trace
from mok_modular.ranks.group import LocalGroup, as_member
from mok_modular.ranks.member import Member
from mok_modular.targets.cuda.process import ProcessWorkspace
from mok_modular.targets.cuda.workspace import CudaWorkspace
from mok_modular.targets.host import HostWorkspace
from mok_modular.targets.shared_workspace import SharedWorkspace

_groups: WeakSet[Any] = WeakSet()  # those with cached workspaces


def layout_key(config: MoKConfig) -> tuple[Any, ...]:
    """What of a config decides a workspace's layout: calls may differ in the rest (mode, timeouts, workers)."""
    return (
        config.minibatch_size,
        config.macrobatch_size,
        None if config.schedule_capacity_multiplier is None else float(config.schedule_capacity_multiplier),
        config.dispatch,
        config.combine,
        config.signal_grain,
        config.ring,
        config.wire,
        config.row_block,
        config.signals,
    )


class Workspace:
    """One rank's view of the memory that a group shares. Create it with `get_workspace` or `create_workspace`.

    Attributes: `member`, `config`, `num_local_tokens` (the largest T of any rank), `hidden_size`, `topk`, and
    `x`, the symmetric input buffer [num_local_tokens, H] bf16: an input written there is not copied.
    """

    def __init__(
        self,
        shared: SharedWorkspace,
        member: Member,
        config: MoKConfig,
        num_local_tokens: int,
        hidden_size: int,
        topk: int,
    ) -> None:
        self.shared = shared
        self.member = member
        self.config = config
        self.num_local_tokens = num_local_tokens
        self.hidden_size = hidden_size
        self.topk = topk
        self.device = torch.device(member.group.device)
        self.remembered: dict[Any, Any] = {}  # calls whose arguments were checked (collective.remember)

    @property
    def x(self) -> Tensor:
        """The symmetric input buffer, [num_local_tokens, H] bfloat16."""
        return self.shared.region(self.member.rank(), "x", torch.bfloat16).view(self.num_local_tokens, self.hidden_size)

    def num_bytes(self) -> int:
        """Bytes of all regions of all ranks of the group."""
        return self.shared.native.num_bytes()

    def stage_stats(self) -> list[dict[str, Any]]:
        """What this rank's stages did since `clear_stage_stats`: one dict per (stage, kernel) with `name`, `pass`,
        `kernel`, `num_rows`, `num_bytes`, `flops`, `busy_s` (inside tiles) and `wait_s` (suspended at waits)."""
        return [dict(row) for row in self.shared.stats[self.member.rank()].values()]

    def clear_stage_stats(self) -> None:
        """Starts `stage_stats` anew for this rank."""
        self.shared.stats[self.member.rank()].clear()

    def trace(self) -> Trace:
        """What the workers of all ranks did in the calls with `MoKConfig(trace=True)` since `clear_trace`.

        On a GPU this waits for the device, and where ranks are processes it holds the workers of this rank.
        """
        return self.shared.read_trace()

    def clear_trace(self) -> None:
        """Starts the trace of all ranks anew; a Trace that was taken before stays as it is."""
        self.shared.clear_trace()

    def check(self) -> None:
        """Raises the error of an aborted call, if there was one that no reset has followed."""
        self.shared.check()

    def reset(self) -> None:
        """Makes the workspace usable again after an aborted call. Collective."""
        self.meet("reset", None, lambda _: self.shared.reset())

    def grow(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens a rank; smaller numbers change nothing. Collective.

        Schedules, contexts and what backward_dgrad left stay valid; CUDA graphs must be captured again, and a tensor
        taken from `x` is no longer the input buffer. Raises ValueError on every rank if the numbers differ, MemoryError
        (torch.OutOfMemoryError on a GPU) where there is no room: then nothing has changed.
        """
        _check_size("num_tokens", num_tokens, 0)
        _check_num_routes("num_tokens", num_tokens, self.topk, self.member.size())

        def act(payloads: list[Any]) -> Sequence[Any]:
            _check_same("grow", [{"num_tokens": n} for n in payloads])
            self.shared.grow(num_tokens)
            return [None] * len(payloads)

        self.meet("grow", num_tokens, act)
        self.num_local_tokens = max(self.num_local_tokens, num_tokens)

    def meet(
        self,
        name: str,
        payload: Any,
        act: Callable[[list[Any]], Sequence[Any]],
        start_timeout_s: float | None = None,
        *,
        is_checked_later: bool = False,
    ) -> Any:
        """One collective call on this workspace (see LocalGroup.meet). start_timeout_s: None is the workspace's."""
        if isinstance(payload, Exception):
            self.shared.tell_peers(name, payload)
        sizes = f"num_local_tokens={self.num_local_tokens}, hidden_size={self.hidden_size}, topk={self.topk}"
        tagged = payload if isinstance(payload, Exception) else (self.shared.key, sizes, payload)

        def act_here(arrivals: list[Any]) -> Sequence[Any]:
            for rank, (key, other_sizes, _) in enumerate(arrivals):
                if key != self.shared.key:
                    raise ValueError(
                        f"{name}: rank {rank} makes this call on another workspace ({other_sizes}) than rank "
                        f"{self.member.rank()} ({sizes})"
                    )
            return act([payload for _, _, payload in arrivals])

        group = self.member.group
        timeout_s = self.config.start_timeout_s if start_timeout_s is None else start_timeout_s
        return group.meet(self.member.rank(), name, tagged, act_here, timeout_s, is_checked_later=is_checked_later)


def create_workspace(
    config: MoKConfig,
    group: Any,
    *,
    device: torch.device | str | None = None,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> Workspace:
    """A new workspace for calls with up to `num_local_tokens` tokens a rank. Collective.

    `group`: a LocalMember or a ProcessGroup. `num_local_tokens` is the largest T of any rank, the same on every rank.
    Raises TypeError or ValueError that names the argument; ValueError on every rank if ranks differ.
    """
    member = _check_arguments(config, group, device, num_local_tokens, hidden_size, topk)

    def act(payloads: list[Any]) -> Sequence[Any]:
        _check_same("create_workspace", payloads)
        shared = _shared_workspace_class(member.group)(member.group, config, num_local_tokens, hidden_size, topk)
        return [shared] * len(payloads)

    payload = {
        "num_local_tokens": num_local_tokens,
        "hidden_size": hidden_size,
        "topk": topk,
        "config": layout_key(config),
    }
    shared = member.group.meet(member.rank(), "create_workspace", payload, act, config.start_timeout_s)
    return Workspace(shared, member, config, num_local_tokens, hidden_size, topk)


def get_workspace(
    config: MoKConfig,
    group: Any,
    *,
    device: torch.device | str | None = None,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> Workspace:
    """As `create_workspace`, but cached: the same object as long as `num_local_tokens` fits. Collective only
    when a workspace is created, which every rank sees alike since all its arguments must agree."""
    member = _check_arguments(config, group, device, num_local_tokens, hidden_size, topk)
    found = find_workspace(config, member, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    if found is None:
        found = create_workspace(
            config,
            group,
            device=device,
            num_local_tokens=num_local_tokens,
            hidden_size=hidden_size,
            topk=topk,
        )
        member.group.workspaces[_cache_key(config, member, hidden_size, topk)] = found
        _groups.add(member.group)
    return found


def find_workspace(
    config: MoKConfig, member: Member, *, num_local_tokens: int, hidden_size: int, topk: int
) -> Workspace | None:
    """What get_workspace returns without creating anything; None: nothing."""
    found = member.group.workspaces.get(_cache_key(config, member, hidden_size, topk))
    return found if found is not None and found.num_local_tokens >= num_local_tokens else None


def _cache_key(config: MoKConfig, member: Member, hidden_size: int, topk: int) -> Any:
    return member.rank(), layout_key(config), hidden_size, topk


def _shared_workspace_class(group: Any) -> type[SharedWorkspace]:
    """The target that runs on the group's device."""
    if torch.device(group.device).type == "cpu":
        return HostWorkspace
    if not isinstance(group, LocalGroup):
        return ProcessWorkspace
    return CudaWorkspace


def agree_on_num_tokens(config: MoKConfig, group: Any, num_tokens: int) -> int:
    """The largest `num_tokens` of any rank. Collective."""
    member = as_member(group)

    def act(payloads: list[Any]) -> Sequence[Any]:
        return [max(payloads)] * len(payloads)

    return member.group.meet(member.rank(), "agree_on_num_tokens", num_tokens, act, config.start_timeout_s)


def clear_workspace_cache(group: Any = None) -> None:
    """Forgets the cached workspaces of a member, or, without one, of every group in this process."""
    if group is None:
        for each in list(_groups):
            each.workspaces.clear()
        return
    member = as_member(group)
    cache = member.group.workspaces
    for key in [key for key in cache if key[0] == member.rank()]:
        del cache[key]


def _check_arguments(
    config: MoKConfig, group: Any, device: torch.device | str | None, num_local_tokens: int, hidden_size: int, topk: int
) -> Member:
    member = as_member(group)
    if not isinstance(config, MoKConfig):
        raise TypeError(f"config must be a MoKConfig, got {type(config).__name__}")
    if config.signals == "nvshmem" and isinstance(member.group, LocalGroup):
        raise ValueError("signals='nvshmem' needs ranks that are processes (a ProcessGroup), got a LocalGroup")
    if device is not None and not _is_device_of(member, torch.device(device)):
        raise ValueError(f"device must be the group's, {member.group.device!r}, got {str(device)!r}")
    _check_size("num_local_tokens", num_local_tokens, 0)
    _check_size("hidden_size", hidden_size, 64)
    _check_size("topk", topk, 1)
    if hidden_size % 64 or hidden_size >= 2**31:
        raise ValueError(f"hidden_size must be a multiple of 64 below 2147483648, got {hidden_size}")
    if topk > MAX_TOPK:
        raise ValueError(f"topk must be at most {MAX_TOPK}, got {topk}")
    _check_num_routes("num_local_tokens", num_local_tokens, topk, member.size())
    return member


def _is_device_of(member: Member, device: torch.device) -> bool:
    own = torch.device(member.group.device)
    return device.type == own.type if device.index is None else is_same_device(device, own)


def _check_num_routes(name: str, num_tokens: int, topk: int, num_ranks: int) -> None:
    """Rows are counted in 32 bits."""
    if num_tokens * topk * num_ranks >= 2**31:
        raise ValueError(
            f"{name} times topk times the number of ranks must be below 2147483648, got {num_tokens} * {topk} * "
            f"{num_ranks}"
        )


def _check_size(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def _check_same(call: str, payloads: Sequence[dict[str, Any]]) -> None:
    for name in payloads[0]:
        values = [payload[name] for payload in payloads]
        if any(value != values[0] for value in values):
            given = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"{call}: {name} must be the same on every rank, got {given}")
