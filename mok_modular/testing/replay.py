"""One stage alone on a workload: its kernel on what the stages before it leave, held against its reference.

replay = replay_stage("dispatch", Workload.from_routing(mok.load_routing(), shape, num_ranks=4, num_tokens=256))
replay.is_ok, replay.seconds
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_modular.testing.checks import compare
from mok_modular.testing.replay_launches import LAUNCHES, Inputs
from mok_modular.testing.results import TensorCheck
from mok_modular.testing.workload import Workload

REPLAYED = tuple(LAUNCHES)


@dataclass(frozen=True, eq=False)
class StageReplay:
    """What a stage did. `seconds`: its launches, memory and inputs included. `num_values` of its results were compared,
    `num_differing` have other bits than the reference's. Stages that only move or count must have none; arithmetic is
    held against float64 (`check`, None for the others). `results`: every launch's, as a list of tensors."""

    name: str
    num_rows: int
    seconds: float
    num_values: int
    num_differing: int
    check: TensorCheck | None
    results: list[list[Tensor]]

    @property
    def is_ok(self) -> bool:
        """Whether the stage keeps to its reference."""
        return self.num_differing == 0 if self.check is None else self.check.is_ok

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors."""
        check = None if self.check is None else vars(self.check)
        return {
            "name": self.name,
            "ok": self.is_ok,
            "num_rows": self.num_rows,
            "seconds": self.seconds,
            "num_values": self.num_values,
            "num_differing": self.num_differing,
            "check": check,
        }


def replay_stage(name: str, workload: Workload) -> StageReplay:
    """Runs a stage of REPLAYED alone on all ranks of the workload. Raises ValueError for another name, and for quantize
    where the workload's sizes are none for MXFP8."""
    if name not in REPLAYED:
        raise ValueError(f"a stage that runs alone is one of {', '.join(REPLAYED)}, got {name!r}")
    inputs = Inputs(workload)
    seconds, results, num_values, num_differing = 0.0, [], 0, 0
    found: list[Tensor] = []
    rounded: list[Tensor] = []
    exact: list[Tensor] = []
    for call in LAUNCHES[name](inputs):
        start_s = time.perf_counter()
        given = _tensors(call.launch())
        seconds += time.perf_counter() - start_s
        wanted = _tensors(call.reference())
        results.append(given)
        for a, b in zip(given, wanted, strict=True):
            num_values += a.numel()
            is_other = (a.view(torch.uint8) != b.view(torch.uint8)).view(*a.shape, a.element_size())
            num_differing += int(is_other.any(-1).sum())
        if call.exact is not None:
            found += [t.flatten() for t in given]
            rounded += [t.flatten() for t in wanted]
            exact += [t.flatten() for t in _tensors(call.exact())]
    check = compare(torch.cat(found), torch.cat(rounded), torch.cat(exact)) if exact else None
    num_rows = sum(int(table.segment_num_rows.sum()) for table in inputs.tables)
    return StageReplay(name, num_rows, seconds, num_values, num_differing, check, results)


def _tensors(result: Any) -> list[Tensor]:
    return [result.contiguous()] if isinstance(result, Tensor) else [t.contiguous() for t in _flat(result)]


def _flat(results: Sequence[Any]) -> Iterator[Tensor]:
    for result in results:
        if isinstance(result, Tensor):
            yield result
        else:
            yield from _flat(result)
