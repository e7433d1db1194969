"""Every triple of the options that a GPU takes, and kernels with communicating SMs in plans that launch several."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import helpers
import pytest
import torch
from helpers import make_workload, same_bits
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig
from mok_modular.protocol.plan import all_plans
from mok_modular.testing import Workload
from mok_modular.testing.covering import covering_array, missing, run_array, unplain
from mok_modular.testing.kernels import all_kernels, compile_kernels

DEVICE = "cuda:0"
NUM_COMM_SMS = (1, 2, 5, 17, 33, 1000)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_kernels([*all_kernels(), *all_kernels(is_traced=True)])


@pytest.mark.timeout(1800)
def test_every_triple() -> None:
    rows = covering_array("sm_90a", 3)
    assert missing(rows, "sm_90a", 3) == []
    wrong = []
    for number, choice, text in run_array(rows, DEVICE):
        if text:
            given = json.dumps(unplain(choice, "sm_90a"))
            command = f"python -m mok_modular.testing.covering --device {DEVICE} --choice '{given}'"
            wrong.append(f"{number}: {text}; {command}")
    assert not wrong, "\n".join(wrong)


def run(workload: Workload, group: LocalGroup, **options: Any) -> Tensor:
    """The outputs of all ranks' tokens after one call; a hang ends after seconds."""
    config = MoKConfig(minibatch_size=256, macrobatch_size=256, timeout_s=2, start_timeout_s=10, **options)

    def step(member: Any) -> Tensor:
        workspace = helpers.workspace_for(workload, member, config)
        outputs = [helpers.call(workload, workspace, config) for _ in range(2)]
        workspace.check()
        assert same_bits(*outputs)
        return outputs[0]

    return torch.cat(group.run(step)).cpu()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_tokens", "sizes"),
    [
        ([464], {"H": 128, "I": 192, "E": 3, "K": 1, "S": 0}),
        ([0, 0], {"H": 320, "I": 320, "E": 10, "K": 8, "S": 0}),
        ([672, 658, 134, 545, 655], {"H": 512, "I": 768, "E": 25, "K": 3, "S": 128}),
    ],
    ids=["rows", "no tokens", "five ranks"],
)
@pytest.mark.parametrize("plan", [str(plan) for plan in all_plans()])
def test_communicating_sms_in_every_plan(plan: str, num_tokens: Sequence[int], sizes: dict[str, int]) -> None:
    """A role is drawn once per launch: with a counter per call, the second kernel of a plan had no communicating CTA.
    Copies leave SMs to products: with a CTA on every SM, no product could start, and the copies waited for it."""
    cpu = make_workload(num_tokens, routing=spread_over(sizes["E"], sizes["K"]), **sizes)
    workload, group = cpu.to(DEVICE), LocalGroup(len(num_tokens), device=DEVICE)
    base = run(workload, group, mode="split")
    if sum(num_tokens):
        helpers.assert_right(cpu, base)
    for num_comm_sms in NUM_COMM_SMS:
        output = run(workload, group, mode=plan, fwd_num_comm_sms=num_comm_sms)
        assert same_bits(output, base), f"fwd_num_comm_sms={num_comm_sms}"


def spread_over(num_experts: int, topk: int) -> Callable[[int, int, torch.Generator], Tensor]:
    """Every token to random experts, none of them missing."""
    return lambda rank, count, generator: torch.randint(0, num_experts, (count, topk), generator=generator)
