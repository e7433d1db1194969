"""What a run of a workload gives: outputs and gradients by rank, what the stages did, and how far values are off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

MAX_RATIO = 1.5
"""How much further than torch's BF16 matmuls, at the same rounding points, an output may be from float64."""


@dataclass(frozen=True)
class StageStats:
    """What one stage did, summed over ranks and launches: `busy_s` in tiles, `wait_s` suspended at waits."""

    name: str
    pass_name: str
    kernel: str
    num_rows: int
    num_bytes: int
    flops: int
    busy_s: float
    wait_s: float

    def to_json(self) -> dict[str, Any]:
        """The same as a dict, `pass_name` under the key `pass`."""
        return {("pass" if key == "pass_name" else key): value for key, value in vars(self).items()}


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """Outputs by rank, the stages, and times from the first rank's start to the last one's end."""

    outputs: list[Tensor]
    stages: list[StageStats]
    seconds: float
    """functional.forward alone."""
    schedule_seconds: float
    """functional.build_schedule, which ran just before."""


@dataclass(frozen=True, eq=False)
class PassesResult(ForwardResult):
    """The same of a forward and a backward; `gradients` by name (d_x, d_routed_gate, ...) and rank."""

    gradients: dict[str, list[Tensor]]
    backward_seconds: float

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """Output and gradients."""
        return {"output": self.outputs, **self.gradients}


@dataclass(frozen=True)
class TensorCheck:
    """Relative 2-norm distances from float64: the library's, torch's in bfloat16, and their quotient."""

    error: float
    torch_error: float
    ratio: float

    @property
    def is_ok(self) -> bool:
        """False for NaN too."""
        return self.ratio <= MAX_RATIO
