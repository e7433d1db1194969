"""Real calls under the happens-before checker: run by tests/cpu/test_happens_before.py in a process of its own.

    python tests/happens_before.py EXTENSION CASE    # prints one JSON object

EXTENSION is the checked build of the host target (cmake --build . --target _host_checked).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    """The checked extension in place of the installed one."""
    spec = importlib.util.spec_from_file_location("mok_modular._host", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mok_modular._host"] = module
    spec.loader.exec_module(module)
    return module


host = load(sys.argv[1])
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from helpers import build, forward, make_workload, weights_of, workspace_for  # noqa: E402

from mok_modular import LocalGroup, MoKConfig, functional  # noqa: E402
from mok_modular.protocol.plan import all_plans  # noqa: E402
from mok_modular.testing import faults  # noqa: E402

RING = {"minibatch_size": 128, "macrobatch_size": 128}
FULL = {"minibatch_size": 256, "macrobatch_size": 131072}

CASES: dict[str, dict[str, Any]] = {str(plan): {"mode": str(plan), **RING} for plan in all_plans()}
CASES |= {
    "grain": {"mode": "fused", **RING, "signal_grain": "minibatch"},
    "serial": {"mode": "fused", **RING, "ring": "serial"},
    "pull once": {"mode": "split", **FULL, "dispatch": "pull_once"},
    "fused pull once": {"mode": "fused", **FULL, "dispatch": "pull_once"},
    "push": {"mode": "split", **FULL, "dispatch": "push"},
    "push and pull": {"mode": "split", **FULL, "dispatch": "push", "combine": "pull"},
    "fused push and pull": {"mode": "fused", **FULL, "dispatch": "push", "combine": "pull"},
}


def run(options: dict[str, Any], planted: str | None, order: str, seed: int) -> dict[str, Any]:
    """Two schedules, two forwards, a recomputation and a backward of three ranks, one of them without tokens."""
    torch.set_num_threads(1)
    workload = make_workload([90, 60, 0], E=3, K=5, H=192, I=128, S=128)
    config = MoKConfig(**options)

    def step(member: Any) -> None:
        rank = member.rank()
        weights = weights_of(workload, member)
        x, router = workload.x[rank], workload.router_weights[rank]
        workspace = workspace_for(workload, member, config)
        if rank == 0:
            host.start_happens_before()
        first = build(workload, workspace, config)
        _, first_context = forward(workload, workspace, config, first)
        second = build(workload, workspace, config)
        forward(workload, workspace, config, second)
        functional.recompute_forward_context(config, workspace, second, x, *weights[:2], *weights[3:5])
        functional.backward(config, workspace, first, first_context, x, x, router, *weights)

    error = ""
    try:
        with faults.plant(*([planted] if planted else [])):
            LocalGroup(3, num_workers=2, order=order, seed=seed).run(step)
    except RuntimeError as caught:
        error = str(caught).splitlines()[0]
    races, num_races, num_accesses, num_releases = host.happens_before_races()
    report = {"races": races, "num_races": num_races, "num_accesses": num_accesses}
    return report | {"num_releases": num_releases, "error": error}


if __name__ == "__main__":
    planted = sys.argv[3] if len(sys.argv) > 3 and sys.argv[3] else None
    order = sys.argv[4] if len(sys.argv) > 4 else "round_robin"
    print(json.dumps(run(CASES[sys.argv[2]], planted, order, seed=7)))
