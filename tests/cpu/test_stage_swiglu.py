"""The swiglu stage alone, against the float64 formula: at most one bfloat16 apart, NaN, Inf, -0 and limits included."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from stage_data import INTERMEDIATE_SIZES, groups, identified, same_bits
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import swiglu
from mok_modular.targets import host_stage, stage_arguments

LIMITS = (None, 0.0, 1e-3, 1.0, 7.0, 1e30, float("inf"))
# exp(-gate) passes the largest float32 here: below, silu is -0, as with torch's sigmoid, and not -3e-37.
LOWEST_GATE = -88.72


def formula(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """float64, from the bfloat16 values and the limit as a float32."""
    g, u = gate.double().numpy(), up.double().numpy()
    if limit is not None:
        bound = float(np.float32(limit))
        g = np.where(g > bound, bound, g)
        u = np.where(u > bound, bound, np.where(u < -bound, -bound, u))
    with np.errstate(all="ignore"):
        return torch.from_numpy(g / (1 + np.exp(-g)) * u)


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many bfloat16 values lie between a and b; -0 and 0 count as neighbours."""

    def order(t: Tensor) -> Tensor:
        bits = t.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)

    return (order(a) - order(b)).abs()


def check(gate: Tensor, up: Tensor, limit: float | None, out: Tensor) -> None:
    exact = formula(gate, up, limit)
    assert out.shape == gate.shape and out.dtype == torch.bfloat16
    # A NaN in either, and only there, or 0 * Inf.
    assert torch.equal(out.isnan(), exact.isnan() | ((gate < LOWEST_GATE) & (up.abs() == torch.inf) & out.isnan()))
    is_number = ~out.isnan()
    is_low = gate < LOWEST_GATE
    assert (steps(out, exact.bfloat16()) <= 1)[is_number & ~is_low].all()
    assert ((out == 0) | (steps(out, exact.bfloat16()) <= 1))[is_number & is_low].all()
    if limit != 0:  # which zero a clamp to [-0, 0] gives is nobody's business
        assert torch.equal(out.signbit()[is_number], exact.signbit()[is_number])


def all_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("limit", LIMITS)
def test_every_bfloat16_gate(limit: float | None) -> None:
    ups = torch.tensor([0.0, -0.0, 1.0, -0.3359375, 7.03125, 1e-30, -3e38, torch.inf, -torch.inf, torch.nan]).bfloat16()
    gate = all_bfloat16().view(1, 1024, 64).expand(len(ups), -1, -1)
    up = ups[:, None, None].expand_as(gate)
    check(gate, up, limit, swiglu.launch(gate, up, limit))


@pytest.mark.parametrize("limit", LIMITS)
def test_every_bfloat16_up(limit: float | None) -> None:
    gates = torch.tensor(
        [0.0, -0.0, 1.0, -2.765625, 20.0, -80.0, -100.0, 3e38, torch.inf, -torch.inf, torch.nan]
    ).bfloat16()
    up = all_bfloat16().view(1, 1024, 64).expand(len(gates), -1, -1)
    gate = gates[:, None, None].expand_as(up)
    check(gate, up, limit, swiglu.launch(gate, up, limit))


def test_limits_compare_what_bfloat16_holds() -> None:
    # 1.0 lies between two bfloat16 neighbours of the limit; the gate above it becomes the limit in float32.
    limit = 1.0 + 2.0**-9
    gate = torch.tensor([1.0, 1.0078125, 8.0, -8.0]).bfloat16().repeat(16)[None]
    up = torch.full_like(gate, 0.5)
    out = swiglu.launch(gate, up, limit)
    check(gate, up, limit, out)
    assert out[0, 1] == out[0, 2]


@hypothesis.given(
    num_rows=st.integers(0, 300),
    width=st.sampled_from(INTERMEDIATE_SIZES),
    limit=st.sampled_from(LIMITS),
    data=st.data(),
)
@hypothesis.settings(max_examples=30)
def test_every_element_meets_its_own_partner(
    num_rows: int, width: int, limit: float | None, data: st.DataObject
) -> None:
    # Gate and up of an element say where they stand: any other pairing would give other values.
    gate = (identified(1, num_rows, width).view(torch.int16) % 997).bfloat16() / 64 - 7
    up = (identified(2, num_rows, width).view(torch.int16) % 499).bfloat16() / 32 - 7
    out = swiglu.launch(gate, up, limit, group=data.draw(groups(1)))
    check(gate, up, limit, out)
    want = swiglu.reference(gate, up, limit)
    assert (steps(out, want) <= 1)[(out != 0) | (want != 0)].all()


@pytest.mark.parametrize("row_block", [128, 256])
def test_padding_rows_give_zeros(row_block: int) -> None:
    # Two experts; what gate_up leaves in padding rows is zero.
    starts, counts = torch.tensor([0, row_block, 3 * row_block]), torch.tensor([40, row_block + 1])
    run = host_stage.HostStageRun(
        "swiglu",
        [stage_arguments.segment_tables(starts, counts, row_block)],
        row_block=row_block,
        num_tokens=[0],
        intermediate_size=64,
    )
    gate, up = (torch.randn(3 * row_block, 64).bfloat16() for _ in range(2))
    is_padding = torch.ones(3 * row_block, dtype=torch.bool)
    is_padding[:40] = is_padding[row_block : 2 * row_block + 1] = False
    gate[is_padding] = up[is_padding] = 0
    run.fill(0, "ring_gate", gate)
    run.fill(0, "ring_up", up)
    hidden = run.region(0, "ring_hidden", 64)
    assert hidden.isnan().all()
    (stats,) = run.launch()[0]
    assert stats["num_rows"] == 40 + row_block + 1
    assert not hidden[is_padding].view(torch.int16).any()
    assert same_bits(hidden, swiglu.launch(gate, up))


def test_shapes_views_and_workers() -> None:
    gate, up = torch.randn(2, 3, 5, 192).bfloat16()
    want = swiglu.launch(gate, up, 0.5)
    assert want.shape == (3, 5, 192)
    views = [t.mT.contiguous().mT for t in (gate, up)]
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        assert same_bits(swiglu.launch(views[0], views[1], 0.5, group=group), want)
    assert same_bits(swiglu.launch(gate[0, 0], up[0, 0], 0.5), want[0, 0])
    assert swiglu.launch(gate[:0], up[:0]).shape == (0, 5, 192)


def test_what_is_wrong_is_named() -> None:
    gate = torch.zeros(2, 64).bfloat16()
    with pytest.raises(TypeError, match=r"gate must be torch\.bfloat16 for the kernel, got torch\.float32"):
        swiglu.launch(gate.float(), gate.float())
    with pytest.raises(TypeError, match=r"up has dtype torch\.float32 but gate has torch\.bfloat16"):
        swiglu.launch(gate, gate.float())
    with pytest.raises(ValueError, match="must be a positive multiple of 64 for the kernel, got 63"):
        swiglu.launch(gate[:, :63], gate[:, :63])
    with pytest.raises(ValueError, match="same shape"):
        swiglu.launch(gate, gate[:1])
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="limit="):
            swiglu.launch(gate, gate, limit)
    with pytest.raises(ValueError, match="group has 2 ranks, the arguments are for 1"):
        swiglu.launch(gate, gate, group=LocalGroup(2))
