"""One stage's kernel alone, where its arguments are: on the host target or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mok_modular.protocol.checks import is_same_device
from mok_modular.ranks.group import LocalGroup
from mok_modular.targets.cuda.stage import CudaStageRun
from mok_modular.targets.host_stage import HostStageRun
from mok_modular.targets.stage_base import StageRun


def open_run(
    stage: str,
    tables: Sequence[Mapping[str, Tensor]],
    *,
    device: torch.device,
    group: LocalGroup | None = None,
    **sizes: Any,
) -> StageRun:
    """A StageRun where the arguments are, on the CPU or a GPU.

    Raises ValueError if `group` is somewhere else, or the stage is one of a backward and not on the CPU, and what
    StageRun raises.
    """
    if device.type != "cpu" and sizes.get("kind", "forward") != "forward":
        raise ValueError(f"{stage} runs alone on the CPU only, as a backward does; the arguments are on {device}")
    group = group or LocalGroup(len(tables), device="cpu" if device.type == "cpu" else str(device))
    if not is_same_device(torch.device(group.device), device):
        raise ValueError(f"group must be where the arguments are, on {device}, got {group.device}")
    if device.type == "cpu":
        return HostStageRun(stage, tables, group=group, **sizes)
    return CudaStageRun(stage, tables, group=group, **sizes)
