"""The MXFP8 reference: exact in float64 against autograd, quantized where it says, near the unquantized layer."""

from __future__ import annotations

import dataclasses

import mxfp8_model as model
import pytest
import torch
from helpers import make_workload, same_bits
from torch import Tensor

from mok_modular import reference, reference_mxfp8
from mok_modular.reference_mxfp8 import Gradients
from mok_modular.stages import quantize
from mok_modular.testing import Workload

SIZES = {"H": 128, "I": 256, "S": 384, "E": 6, "K": 3}
WEIGHTS = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")


def arguments(workload: Workload, dtype: torch.dtype) -> list[list[Tensor] | Tensor | float | None]:
    weights = [getattr(workload.weights, name) for name in WEIGHTS]
    return [
        [x.to(dtype) for x in workload.x],
        workload.expert_ids,
        [w.to(torch.float64 if dtype == torch.float64 else torch.float32) for w in workload.router_weights],
        *(None if w is None else w.to(dtype) for w in weights),
        workload.swiglu_limit,
    ]


def d_outputs(workload: Workload, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(77)
    return [torch.randn(x.shape, generator=generator).bfloat16().to(dtype) for x in workload.x]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def flat(gradients: Gradients) -> dict[str, Tensor]:
    """By name, ranks one after the other."""
    parts = {item.name: getattr(gradients, item.name) for item in dataclasses.fields(gradients)}
    return {name: torch.cat(part) if isinstance(part, list) else part for name, part in parts.items() if len(part)}


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("shared_size", [0, 384])
def test_float64_is_what_autograd_finds(limit: float | None, shared_size: int) -> None:
    workload = make_workload([37, 0, 90], **{**SIZES, "S": shared_size}, swiglu_limit=limit)
    args = arguments(workload, torch.float64)
    for given in (*args[0], *args[2], *(w for w in args[3:9] if w is not None)):
        given.requires_grad_()
    outputs = reference.moe_ranks(*args)
    mine = reference_mxfp8.forward(*args)
    for a, b in zip(mine, outputs, strict=True):
        torch.testing.assert_close(a, b)
    d_output = d_outputs(workload, torch.float64)
    torch.autograd.backward(outputs, d_output)
    with torch.no_grad():
        got = reference_mxfp8.backward(d_output, *args)
    for name, parts in (("x", args[0]), ("router_weights", args[2])):
        for part, gradient in zip(parts, getattr(got, name), strict=True):
            torch.testing.assert_close(gradient, part.grad)
    for name, weight in zip(WEIGHTS, args[3:9], strict=True):
        gradient = getattr(got, name)
        if weight is None:
            assert gradient == []
        else:
            torch.testing.assert_close(sum(gradient) if isinstance(gradient, list) else gradient, weight.grad)


def test_quantized_near_the_exact_gradients() -> None:
    workload = make_workload([137, 3, 200], **SIZES)
    exact = reference_mxfp8.backward(d_outputs(workload, torch.float64), *arguments(workload, torch.float64))
    args, d_output = arguments(workload, torch.bfloat16), d_outputs(workload, torch.bfloat16)
    got = reference_mxfp8.backward(d_output, *args)
    for name, gradient in flat(got).items():
        assert gradient.dtype == (torch.float32 if name == "router_weights" else torch.bfloat16)
        assert cosine(gradient, flat(exact)[name]) >= 0.996, name
    output = torch.cat(reference_mxfp8.forward(*args))
    truth = torch.cat(reference_mxfp8.forward(*arguments(workload, torch.float64)))
    assert 0.01 < float((output.double() - truth).norm() / truth.norm()) < 0.08


def test_the_shared_expert_is_not_quantized() -> None:
    workload = make_workload([64, 30], **SIZES)
    workload = dataclasses.replace(workload, expert_ids=[torch.full_like(ids, -1) for ids in workload.expert_ids])
    args = arguments(workload, torch.bfloat16)
    for a, b in zip(reference_mxfp8.forward(*args), reference.moe_ranks(*args), strict=True):
        assert same_bits(a, b)


def test_round_trip_along_either_axis() -> None:
    x = torch.randn(3, 128, 256).bfloat16()
    assert same_bits(quantize.round_trip(x)[1], model.round_trip(x[1]))
    assert same_bits(quantize.round_trip(x, dim=-2)[1], model.round_trip(x[1].mT.contiguous()).mT)
