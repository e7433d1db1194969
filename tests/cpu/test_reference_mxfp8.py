"""The MXFP8 reference: the BF16 one but for its quantizations, and those where it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import mxfp8_model as model
import pytest
import torch
from helpers import make_workload, same_bits
from torch import Tensor

from mok_modular import reference
from mok_modular.reference import mxfp8 as reference_mxfp8
from mok_modular.stages import quantize
from mok_modular.testing import Workload

SIZES = {"H": 128, "I": 256, "S": 384, "E": 6, "K": 3}


def arguments(workload: Workload) -> tuple[Any, ...]:
    weights = vars(workload.weights).values()
    return (workload.x, workload.expert_ids, workload.router_weights, *weights, workload.swiglu_limit)


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("shared_size", [0, 384])
def test_without_quantization_it_is_the_bf16_reference(
    limit: float | None, shared_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = make_workload([37, 0, 90], **{**SIZES, "S": shared_size}, swiglu_limit=limit)
    args, d_outputs = arguments(workload), workload.d_outputs()
    monkeypatch.setattr(reference_mxfp8, "round_trip", lambda values, dim: values)
    for a, b in zip(reference_mxfp8.moe_ranks(*args), reference.moe_ranks(*args), strict=True):
        assert same_bits(a, b)
    mine, theirs = (module.layer_backward(d_outputs, *args) for module in (reference_mxfp8, reference))
    for a, b in zip(mine, theirs, strict=True):
        assert all(x is y is None or same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_what_is_quantized_along_which_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make_workload([64, 30], **SIZES)
    seen: list[tuple[int, ...]] = []

    def spy(values: Tensor, dim: int) -> Tensor:
        seen.append((values.dim(), values.shape[-1], dim))
        return quantize.round_trip(values, dim)

    monkeypatch.setattr(reference_mxfp8, "round_trip", spy)
    weights = [(3, 128), (3, 128), (3, 256)]
    reference_mxfp8.moe_ranks(*arguments(workload))
    assert sorted(seen) == sorted([*[(2, 128, -1), (2, 256, -1)] * 2, *((*w, -1) for w in weights)])
    seen.clear()
    reference_mxfp8.layer_backward(workload.d_outputs(), *arguments(workload))
    by_row = [(2, 128, -1), (2, 128, -1), (2, 256, -1), (2, 256, -1)]  # x, d_output, d_gate, d_up
    by_column = [(2, 128, 0), (2, 128, 0), (2, 256, 0), (2, 256, 0), (2, 256, 0)]  # and w * h
    assert sorted(seen) == sorted(
        [*(by_row + by_column) * 2, *((*w, -1) for w in weights), *((*w, -2) for w in weights)]
    )


def test_near_the_exact_layer() -> None:
    workload = make_workload([137, 3, 200], **SIZES)
    exact = workload.reference_gradients(torch.float64)
    got = reference_mxfp8.layer_backward(workload.d_outputs(), *arguments(workload))
    for i, name in enumerate(got[0]._fields):
        assert cosine(torch.cat([g[i] for g in got]), torch.cat(exact[f"d_{name}"])) >= 0.996, name
    output, truth = (
        torch.cat(reference_mxfp8.moe_ranks(*arguments(workload))),
        torch.cat(workload.reference(torch.float64)),
    )
    assert 0.01 < float((output.double() - truth).norm() / truth.norm()) < 0.08


def test_the_shared_expert_is_not_quantized() -> None:
    workload = make_workload([64, 30], **SIZES)
    workload = dataclasses.replace(workload, expert_ids=[torch.full_like(ids, -1) for ids in workload.expert_ids])
    args = arguments(workload)
    for a, b in zip(reference_mxfp8.moe_ranks(*args), reference.moe_ranks(*args), strict=True):
        assert same_bits(a, b)


def test_round_trip_along_either_axis() -> None:
    x = torch.randn(3, 128, 256).bfloat16()
    assert same_bits(quantize.round_trip(x)[1], model.round_trip(x[1]))
    assert same_bits(quantize.round_trip(x, dim=-2)[1], model.round_trip(x[1].mT.contiguous()).mT)
