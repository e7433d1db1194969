"""Everything is compared with references, so autocast and torch's matmul precision must not reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import SMALL_RING, call, make_workload, workspace_for
from torch import Tensor

from mok_modular import LocalGroup, MoKConfig, reference, stages
from mok_modular.reference import mxfp8 as reference_mxfp8
from mok_modular.testing import Workload

DTYPES = (torch.bfloat16, torch.float32)
SEGMENTS = torch.tensor([0, 128, 384], dtype=torch.int32), torch.tensor([100, 172], dtype=torch.int32)


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "medium": lambda: matmul_precision("medium"),
    "high": lambda: matmul_precision("high"),
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def layer_arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    workload = make_workload([40, 30])
    weights = workload.weights
    tensors = (
        weights.routed_gate, weights.routed_up, weights.routed_down,
        weights.shared_gate, weights.shared_up, weights.shared_down,
    )  # fmt: skip
    xs = [x.to(dtype) for x in workload.x]
    return xs, workload.expert_ids, workload.router_weights, *(None if w is None else w.to(dtype) for w in tensors)


def layer_backward(module: Any, dtype: torch.dtype) -> Any:
    arguments = layer_arguments(dtype)
    return module.layer_backward([torch.ones_like(x) for x in arguments[0]], *arguments)


def case(
    fn: Callable[..., Any], *shapes: tuple[int, ...], after: tuple[Any, ...] = SEGMENTS
) -> list[Callable[[], Any]]:
    """`fn` on random tensors of these shapes, and `after`, once with each dtype whose products are float32."""

    def run(dtype: torch.dtype) -> Any:
        return fn(*(random(*shape, dtype=dtype) for shape in shapes), *after)

    return [lambda dtype=dtype: run(dtype) for dtype in DTYPES]


CASES: dict[str, list[Callable[[], Any]]] = {
    "wgrad": case(stages.wgrad.reference, (384, 64), (384, 128)),
    "grouped_gemm": case(stages.grouped_gemm.reference, (384, 64), (2, 128, 64)),
    "grouped_dgrad": case(stages.grouped_dgrad.reference, (384, 64), (2, 64, 128)),
    "swiglu": case(stages.swiglu.reference, (40, 64), (40, 64), after=()),
    "moe_ranks": [lambda dtype=dtype: reference.moe_ranks(*layer_arguments(dtype)) for dtype in DTYPES],
    "layer_backward": [lambda dtype=dtype: layer_backward(reference, dtype) for dtype in DTYPES],
    "mxfp8 moe_ranks": [lambda: reference_mxfp8.moe_ranks(*layer_arguments(torch.bfloat16))],
    "mxfp8 layer_backward": [lambda: layer_backward(reference_mxfp8, torch.bfloat16)],
}


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in tensors_of(part)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_references_compute_in_full_precision(name: str, setting: str) -> None:
    for fn in CASES[name]:
        exact = tensors_of(fn())
        with SETTINGS[setting]():
            found = tensors_of(fn())
        assert [t.dtype for t in found] == [t.dtype for t in exact]
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_the_callers_settings_stay() -> None:
    with torch.autocast("cpu", dtype=torch.float16), matmul_precision("medium"):
        CASES["wgrad"][0]()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_swapped_stage_computes_in_the_dtypes_of_its_tensors() -> None:
    """Autocast touches no stage, the caller's own ones included."""
    workload = make_workload([40, 30])
    seen: list[torch.dtype] = []

    def swiglu(gate: Tensor, up: Tensor, limit: Any = None, *, num_rows: Any = None) -> Tensor:
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return stages.swiglu.reference(gate, up, limit, num_rows=num_rows)

    def outputs(workload: Workload, executor: str) -> list[Tensor]:
        config = MoKConfig(mode="split", stages={"swiglu": swiglu}, **SMALL_RING)
        step = lambda member: call(workload, workspace_for(workload, member, config), config)  # noqa: E731
        return LocalGroup(2, executor=executor).run(step)

    for executor in ("fibers", "threads"):
        plain = outputs(workload, executor)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = outputs(workload, executor)
        assert set(seen) == {torch.float32}
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
