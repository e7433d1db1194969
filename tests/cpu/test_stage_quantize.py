"""The quantize stage alone, bit for bit against MXFP8 by its definition; padding, NaN, Inf and subnormals included."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import mxfp8_model as model
import pytest
import torch
from stage_data import filled, groups, identified, same_bits, segments
from torch import Tensor

from mok_modular import LocalGroup
from mok_modular.stages import quantize
from mok_modular.targets import host_stage, stage_arguments

WIDTHS = (128, 384, 768)
KINDS = ("identified", "normal", "any bits", "tiny", "huge")


def make_rows(kind: str, num_rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "identified":
        return identified(seed, num_rows, width)
    if kind == "any bits":  # a NaN or an Inf in one block of four
        bits = torch.randint(-(2**15), 2**15, (num_rows, width), generator=generator).to(torch.int16)
        rows = bits.view(torch.bfloat16)
        keep = torch.randint(0, 128, rows.shape, generator=generator) == 0
        return torch.where(keep | rows.isfinite(), rows, 0)
    scale = {"normal": 1.0, "tiny": 1e-38, "huge": 1e38}[kind]
    return (torch.randn(num_rows, width, generator=generator).clamp(-3, 3) * scale).bfloat16()


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but any NaN is one."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(torch.where(a.isnan(), 0, a), torch.where(b.isnan(), 0, b))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=25)
def test_like_the_definition(data: st.DataObject) -> None:
    row_block = data.draw(st.sampled_from([128, 256]))
    starts, counts = data.draw(segments(row_block, max_experts=3, max_blocks=1))
    width, kind = data.draw(st.sampled_from(WIDTHS)), data.draw(st.sampled_from(KINDS))
    num_rows = int(starts[-1]) + 128 * data.draw(st.integers(0, 1))
    rows = make_rows(kind, num_rows, width, data.draw(st.integers(0, 99)))
    is_filled = filled(starts, counts, num_rows)
    rows[~is_filled] = float("nan")  # padding is not looked at
    out = quantize.launch(rows, starts, counts, row_block=row_block, group=data.draw(groups(1)))
    reference = quantize.reference(rows, starts, counts)
    rows[~is_filled] = 0
    for want in (reference, model.round_trip(rows.mT.contiguous()).mT if num_rows else rows):
        assert same_numbers(out, want)
    padding = out[~is_filled]
    assert not padding[~padding.isnan()].view(torch.int16).any()


@pytest.mark.parametrize("row_block", [128, 256])
def test_padding_and_what_is_counted(row_block: int) -> None:
    starts, counts = torch.tensor([0, row_block, 3 * row_block]), torch.tensor([40, row_block + 1])
    run = host_stage.HostStageRun(
        "quantize",
        [stage_arguments.segment_tables(starts, counts, row_block)],
        row_block=row_block,
        num_tokens=[0],
        hidden_size=128,
        intermediate_size=384,
        kind="backward_wgrad",
        is_mxfp8=True,
    )
    is_padding = ~filled(starts, counts, 3 * row_block)
    # Every operand of the weight gradients, from where it is to where it may go.
    places = {
        "ring_x": ("ring_x", 128),
        "ring_d_y": ("ring_d_y", 128),
        "ring_d_gate": ("ring_gate", 384),
        "ring_d_up": ("ring_up", 384),
        "ring_hidden": ("ring_hidden", 384),
    }
    rows = {}
    for source, (_, width) in places.items():
        rows[source] = torch.randn(3 * row_block, width).bfloat16()
        rows[source][is_padding] = 0
        run.fill(0, source, rows[source])
    (stats,) = run.launch()[0]
    num_rows = 41 + row_block
    assert (stats["num_rows"], stats["num_bytes"]) == (num_rows, num_rows * (2 * 128 + 3 * 384) * 4)
    for source, (place, width) in places.items():
        out = run.region(0, place, width)
        assert not out[is_padding].view(torch.int16).any()
        assert same_bits(out.clone(), quantize.reference(rows[source], starts, counts)), source
    for source in ("ring_d_gate", "ring_d_up"):  # gate_up_dgrad reads them yet
        assert same_bits(run.region(0, source, 384).clone(), rows[source])


def test_rows_of_mxfp8_change_only_by_underflow() -> None:
    # What was quantized along its columns has three mantissa bits; a power of two per 32 rows keeps them all, unless a
    # value is so far below its neighbours that the format has no room for it.
    rows = quantize.round_trip(torch.randn(256, 384).bfloat16())
    starts, counts = torch.tensor([0, 256]), torch.tensor([256])
    out = quantize.launch(rows, starts, counts)
    changed = out != rows
    amax = rows.unflatten(0, (-1, 32)).abs().amax(1).repeat_interleave(32, 0)
    assert (rows.abs() < amax.float() / 448 * 2**-3)[changed].all()
    assert changed.float().mean() < 0.05


def test_workers_and_executors() -> None:
    rows = torch.randn(512, 384).bfloat16()
    starts, counts = torch.tensor([0, 256, 512]), torch.tensor([199, 256])
    want = quantize.launch(rows, starts, counts)
    for executor in ("fibers", "threads"):
        group = LocalGroup(1, order="random", executor=executor, num_workers=3)
        assert same_bits(quantize.launch(rows, starts, counts, group=group), want)


def test_what_is_wrong_is_named() -> None:
    starts, counts = torch.tensor([0, 128]), torch.tensor([5])
    with pytest.raises(TypeError, match=r"rows must be torch\.bfloat16, got torch\.float32"):
        quantize.launch(torch.zeros(128, 128), starts, counts)
    rows = torch.zeros(128, 192, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="W a multiple of 128 in MXFP8"):
        quantize.launch(rows, starts, counts)
    with pytest.raises(ValueError, match="whole blocks of 32 rows"):
        quantize.reference(rows[:, :128], torch.tensor([0, 100]), counts)
    with pytest.raises(ValueError, match="segments must start at 0"):
        quantize.reference(rows[:, :128], starts, torch.tensor([129]))
