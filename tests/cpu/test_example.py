"""examples/train_tiny_moe.py in a few steps: plans agree to the last bit, ranks nearly, and a capture replays."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_modular.routing import load_routing

PATH = Path(__file__).parents[2] / "examples" / "train_tiny_moe.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_tiny_moe", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def losses(example: Any, num_steps: int = 5, **options: Any) -> list[float]:
    return example.train(example.Options(num_steps=num_steps, is_evaluated=False, **options)).losses


def test_plans_agree_to_the_last_bit(example: Any) -> None:
    fused = losses(example, mode="fused")
    assert fused[0] == pytest.approx(5.57, abs=0.05)
    assert fused[-1] < fused[0]
    assert losses(example, mode="split") == fused
    assert losses(example, mode="dispatch|gate_up+swiglu|down+combine") == fused
    torch.testing.assert_close(losses(example, num_ranks=4), fused, rtol=2e-3, atol=0)


def test_mxfp8_stays_near(example: Any) -> None:
    fused = losses(example, num_steps=3, precision="mxfp8")
    assert losses(example, num_steps=3, precision="mxfp8", mode="split") == fused
    in_bf16 = losses(example, num_steps=3)
    assert in_bf16 != fused
    assert max(abs(a - b) for a, b in zip(in_bf16, fused, strict=True)) < 0.05


def test_the_last_steps_are_captured(example: Any, tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    report = example.train(example.Options(num_steps=3, num_ranks=4, capture=str(path), is_evaluated=False))
    routing = load_routing(path)
    assert report.routing is not None
    assert torch.equal(report.routing.expert_ids, routing.expert_ids)
    assert routing.expert_ids.shape == (4, 4, 256, 4)  # two layers of two steps
    assert routing.shape is not None and routing.shape.intermediate_size == example.EXPERT_SIZE
    torch.testing.assert_close(routing.router_weights.sum(-1), torch.ones(4, 4, 256))
