"""What tests, benchmarks and the command line share: inputs, a run of them, and the check against float64."""

from mok_modular.testing import faults
from mok_modular.testing.capture import capture
from mok_modular.testing.checks import check_forward, check_passes, check_tensors
from mok_modular.testing.contract import ContractReport, check_stage
from mok_modular.testing.replay import REPLAYED, StageReplay, replay_stage
from mok_modular.testing.results import MAX_RATIO, ForwardResult, PassesResult, StageStats, TensorCheck
from mok_modular.testing.runs import run_forward, run_forward_plans, run_passes, run_passes_plans
from mok_modular.testing.workload import Workload

__all__ = [
    "MAX_RATIO",
    "REPLAYED",
    "ContractReport",
    "ForwardResult",
    "PassesResult",
    "StageReplay",
    "StageStats",
    "TensorCheck",
    "Workload",
    "capture",
    "check_forward",
    "check_passes",
    "check_stage",
    "check_tensors",
    "faults",
    "replay_stage",
    "run_forward",
    "run_forward_plans",
    "run_passes",
    "run_passes_plans",
]
