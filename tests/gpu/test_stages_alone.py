"""Every stage alone on a GPU against its reference: values say where they come from, every kind of routing."""

from __future__ import annotations

import pytest
import torch
from stage_data import KINDS, filled, identified, routing, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import combine, dispatch, grouped_gemm, reduce, schedule, swiglu

DEVICE = "cuda:0"
TOKENS = ([61, 0, 300, 5], [700], [0, 0], [1, 130])
DIRECTIONS = ("pull", "push")


def on_gpu(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", TOKENS, ids=str)
def test_schedule(num_tokens: list[int], kind: str) -> None:
    case = routing(num_tokens, num_experts=4 * len(num_tokens), topk=6, kind=kind, seed=2)
    built = schedule.launch(on_gpu(case.ids), num_experts=case.num_experts)
    for have, want in zip(built, schedule.reference(case.ids, num_experts=case.num_experts), strict=True):
        num_rows = len(want.peer_rank)
        assert have.num_rows == num_rows
        for name in ("peer_rank", "peer_token_idx"):
            table = getattr(have, name).cpu()
            assert torch.equal(table[:num_rows], getattr(want, name)), name
            assert (table[num_rows:] == -1).all()
        assert torch.equal(have.row_block_expert.cpu()[: len(want.row_block_expert)], want.row_block_expert)
        for name in ("segment_start", "segment_num_rows", "route_rank", "route_row"):
            assert torch.equal(getattr(have, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), zip(TOKENS, (192, 2880, 64, 7168), strict=True), ids=str)
def test_dispatch(num_tokens: list[int], hidden_size: int, kind: str, direction: str) -> None:
    case = routing(num_tokens, num_experts=4 * len(num_tokens), topk=6, kind=kind, seed=3)
    xs = [identified(rank, len(ids), hidden_size) for rank, ids in enumerate(case.ids)]
    tables = schedule.reference(case.ids, num_experts=case.num_experts)
    rows = dispatch.launch(on_gpu(xs), tables, topk=6, direction=direction)
    for have, want in zip(rows, dispatch.reference(xs, tables, topk=6), strict=True):
        assert same_bits(have.cpu(), want)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), zip(TOKENS, (192, 2880, 64, 7168), strict=True), ids=str)
def test_combine(num_tokens: list[int], hidden_size: int, kind: str, direction: str) -> None:
    case = routing(num_tokens, num_experts=4 * len(num_tokens), topk=6, kind=kind, seed=4)
    tables = schedule.reference(case.ids, num_experts=case.num_experts)
    ys = [identified(rank, len(table.peer_rank), hidden_size) for rank, table in enumerate(tables)]
    cells = combine.launch(on_gpu(ys), tables, direction=direction)
    for have, want in zip(cells, combine.reference(ys, tables), strict=True):
        assert same_bits(have.cpu(), want)


@pytest.mark.parametrize("num_rows", [0, 1, 130, 700])
@pytest.mark.parametrize("limit", [None, 0.0, 1.5])
def test_swiglu(num_rows: int, limit: float | None) -> None:
    gate, up = (3 * torch.randn(num_rows, 640) for _ in range(2))
    have = swiglu.launch(gate.bfloat16().to(DEVICE), up.bfloat16().to(DEVICE), limit).cpu()
    want = swiglu.reference(gate.bfloat16(), up.bfloat16(), limit)
    exact = swiglu.reference(gate.bfloat16().double(), up.bfloat16().double(), limit)
    assert (have.double() - exact).norm() <= 1.01 * (want.double() - exact).norm()
    assert (have.double() - want.double()).abs().le(2.0**-7 * exact.abs() + 1e-30).all()  # an ulp


SEGMENTS = ([2048] * 2, [0, 1, 64, 65, 127, 128, 129, 1000], [512] * 5, [0])


@pytest.mark.parametrize("num_rows", SEGMENTS, ids=str)
@pytest.mark.parametrize(("num_k", "num_cols"), [(64, 64), (192, 640), (2880, 192), (1024, 2880), (4096, 1024)])
@pytest.mark.parametrize("is_pair", [True, False])
def test_grouped_gemm(num_rows: list[int], num_k: int, num_cols: int, is_pair: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(5)

    def random(*dims: int) -> Tensor:
        return torch.randn(*dims, device=DEVICE, generator=generator).bfloat16()

    counts = torch.tensor(num_rows, dtype=torch.int32)
    starts = torch.nn.functional.pad(((counts + 127) // 128 * 128).cumsum(0), (1, 0)).to(torch.int32)
    total = int(starts[-1])
    is_row = filled(starts, counts, total)
    rows = random(total, num_k)
    rows[~is_row] = float("nan")  # padding is not read
    weights = tuple(random(len(num_rows), num_cols, num_k) / num_k**0.5 for _ in range(1 + is_pair))
    have = grouped_gemm.launch(rows, weights if is_pair else weights[0], starts, counts)
    for out, weight in zip(have if is_pair else (have,), weights, strict=True):
        exact = grouped_gemm.reference(rows.double(), weight.double(), starts, counts)
        want = grouped_gemm.reference(rows, weight, starts, counts)
        assert not out[~is_row].view(torch.int16).any()
        assert (out.double() - exact).norm() <= 1.1 * (want.double() - exact).norm()


@pytest.mark.parametrize(
    ("num_tokens", "topk", "hidden_size"), [(0, 2, 64), (1, 1, 64), (300, 8, 768), (129, 22, 2880)]
)
@pytest.mark.parametrize("has_shared", [True, False])
def test_reduce(num_tokens: int, topk: int, hidden_size: int, has_shared: bool) -> None:
    combined = torch.randn(num_tokens * topk, hidden_size).bfloat16()
    weights = torch.randn(num_tokens, topk)
    mask = torch.rand(num_tokens, topk) < 0.8
    combined[~mask.view(-1)] = float("nan")  # missing routes are not looked at
    weights[~mask] = float("nan")
    shared = torch.randn(num_tokens, hidden_size).bfloat16() if has_shared else None
    want = reduce.reference(combined, weights, mask, shared)
    arguments = (
        combined.to(DEVICE),
        weights.to(DEVICE),
        mask.to(DEVICE),
        None if shared is None else shared.to(DEVICE),
    )
    assert same_bits(reduce.launch(*arguments).cpu(), want)
    assert same_bits(reduce.launch(*arguments, group=LocalGroup(1, device=DEVICE)).cpu(), want)


def test_what_is_wrong_is_named() -> None:
    gate = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="up must be on the CPU or on one GPU with the other arguments, got cpu"):
        swiglu.launch(gate.to(DEVICE), gate)
    with pytest.raises(ValueError, match="group must be where the arguments are, on cuda:0, got cpu"):
        swiglu.launch(gate.to(DEVICE), gate.to(DEVICE), group=LocalGroup(1))
    case = routing([4], num_experts=4, topk=3)
    tables = schedule.reference(case.ids, num_experts=4, row_block=256)
    with pytest.raises(ValueError, match=r"row_block must be one of \(128,\) here, got 256"):
        dispatch.launch([identified(0, 4, 64).to(DEVICE)], tables, topk=3)
