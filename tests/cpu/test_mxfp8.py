"""MXFP8 quantization bit for bit against an implementation by the definition (tests/mxfp8_model.py)."""

from __future__ import annotations

import mxfp8_model as model
import numpy as np
import pytest
import torch
from torch import Tensor

from mok_modular import ops
from mok_modular.protocol.extension import extension

INF, NAN = float("inf"), float("nan")
MAX_BF16 = torch.finfo(torch.bfloat16).max
ALL_BF16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def assert_quantized(x: Tensor) -> None:
    """Both orientations of x [M, N], and what they dequantize to, are the model's bits."""
    for values, (data, scale) in zip((x, x.mT.contiguous()), both(x), strict=True):
        codes, scales = model.quantize(values)
        assert torch.equal(scale, model.tiled(scales))
        assert torch.equal(data.view(torch.uint8), codes)
        blocks = codes.numpy().reshape(*scales.shape, model.BLOCK)
        want = torch.from_numpy(model.dequantize(blocks, scales.numpy()).reshape(values.shape))
        assert_values(ops.mxfp8_dequantize(data, scale), want)
        assert_values(ops.dequantize_to_bfloat16(data, scale), want)


def both(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    data, scale, data_t, scale_t = ops.mxfp8_quantize(x, rowwise=True, columnwise=True)
    assert data is not None and scale is not None and data_t is not None and scale_t is not None
    return (data, scale), (data_t, scale_t)


def assert_values(got: Tensor, want: Tensor) -> None:
    """The same numbers, signs of zeros and NaN included; `want` is float64 and exact in the dtype of `got`."""
    got = got.double()
    is_nan = want.isnan()
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan], want[~is_nan])
    assert torch.equal(got[~is_nan].signbit(), want[~is_nan].signbit())


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e5, 1e30, 3e38, 1e-30, 1e-37, 1e-39, 0.0])
def test_random_blocks(scale: float) -> None:
    assert_quantized(random(128, 256, seed=1, scale=scale).clamp(-MAX_BF16, MAX_BF16))


def test_magnitudes_mixed_within_a_block() -> None:
    x = random(256, 128, seed=3)
    powers = torch.randint(-140, 128, x.shape, generator=torch.Generator().manual_seed(4))
    assert_quantized(torch.ldexp(x.double(), powers).clamp(-MAX_BF16, MAX_BF16).bfloat16())


@pytest.mark.parametrize(
    ("value", "byte", "code"),
    [
        (0.0, 0, 0x00),
        (-0.0, 0, 0x80),
        (448.0, 127, 0x7E),
        (450.0, 128, 0x76),  # just above 448 a scale of 1 would clip
        (1.0, 119, 0x78),
        (-1.75, 119, 0xFE),
        (MAX_BF16, 247, 0x78),
        (2.0**-133, 0, 0x08),  # the smallest bfloat16
        (2.0**-126, 0, 0x40),
        (1.3e-36, 0, 0x76),
        (INF, 254, 0x7E),
        (-INF, 254, 0xFE),
        (NAN, 255, 0x7F),
        (-NAN, 255, 0x7F),
    ],
)
def test_a_value_alone_in_its_block(value: float, byte: int, code: int) -> None:
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    x[7, 71] = value
    assert_quantized(x)
    for (data, scale), (row, col) in zip(both(x), [(7, 71), (71, 7)], strict=True):
        assert int(scale[0, 0, row % 32, row // 32 * 4 + col // 32]) == byte
        assert int(data.view(torch.uint8)[row, col]) == code


@pytest.mark.parametrize("exponent", [*range(-133, 120, 11), -127, -126, -1, 0, 1, 119])
def test_448_times_a_power_of_two_is_exact(exponent: int) -> None:
    x = torch.full((128, 128), 448 * 2.0**exponent, dtype=torch.float64).bfloat16()
    (data, scale), _ = both(x)
    assert torch.equal(ops.mxfp8_dequantize(data, scale), x.float())


def test_every_bfloat16_as_amax() -> None:
    # Each value stands in a block of its own, with a smaller one beside it.
    x = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    where = torch.arange(2**16)
    x[where // 32, where % 32 * 32 + where % 31] = ALL_BF16
    x[where // 32, where % 32 * 32 + 31] = (ALL_BF16.double() * -0.37).bfloat16()
    assert_quantized(x)
    rowwise, columnwise = both(x)[0], both(x.mT)[1]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(rowwise, columnwise, strict=True))


@pytest.mark.parametrize("byte", [0, 1, 2, 7, 8, 60, 110, 119, 120, 127, 140, 200, 246, 247])
def test_every_bfloat16_as_element(byte: int) -> None:
    # amax 448 * scale gives the scale; every value up to it is an element of such a block.
    amax = min(448 * 2.0 ** (byte - 127), MAX_BF16)
    values = ALL_BF16[ALL_BF16.double().abs() <= amax]
    num_rows = -(-len(values) // (31 * 4) // 128) * 128
    padded = torch.nn.functional.pad(values.view(torch.int16), (0, num_rows * 31 * 4 - len(values)))
    blocks = torch.full((num_rows, 4, 32), amax, dtype=torch.float64).bfloat16()
    blocks[:, :, 1:] = padded.view(torch.bfloat16).view(num_rows, 4, 31)
    assert torch.equal(model.quantize(blocks.view(num_rows, 128))[1].unique(), torch.tensor([byte], dtype=torch.uint8))
    assert_quantized(blocks.view(num_rows, 128))


def test_every_code_under_every_scale_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # row = byte
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    data, scale = codes.view(torch.float8_e4m3fn), model.tiled(bytes_)
    want = torch.from_numpy(model.dequantize(codes.numpy().reshape(256, 8, 32), bytes_.numpy()).reshape(256, 256))
    assert_values(ops.mxfp8_dequantize(data, scale), want)
    assert_values(ops.dequantize_to_bfloat16(data, scale), want.float().bfloat16().double())


@pytest.mark.parametrize("byte", [*range(0, 256, 11), 1, 8, 100, 119, 120, 127, 135, 240, 247, 252, 254])
def test_what_stages_leave_of_every_bfloat16(byte: int) -> None:
    # Stages take a short cut around the codes. Scales that no amax gives are held against the definition too.
    out = torch.empty_like(ALL_BF16)
    extension().mxfp8_round_trip(ALL_BF16.data_ptr(), ALL_BF16.numel(), byte, out.data_ptr())
    blocks, scales = ALL_BF16.double().numpy().reshape(-1, 32), np.full(2**11, byte, dtype=np.uint8)
    want = torch.from_numpy(model.dequantize(model.encode(blocks, scales), scales).reshape(-1))
    assert_values(out, want.bfloat16().double())


def test_saturation() -> None:
    # 1.9375 * 2^127 rounds up to 2^128, which is no bfloat16: it comes back as the largest one.
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([1.9375, -1.9375, 1.921875, 1.0], dtype=torch.float64) * 2.0**127
    (data, scale), _ = both(x)
    back = ops.mxfp8_dequantize(data, scale)[0, :4]
    assert back.tolist() == [MAX_BF16, -MAX_BF16, 1.875 * 2.0**127, 2.0**127]
    # An Inf stays one, and takes what is small beside it along to zero; a NaN takes its whole block.
    x[1, 0], x[1, 1], x[2, 0], x[2, 40] = -INF, 5.0, NAN, 5.0
    (data, scale), _ = both(x)
    back = ops.mxfp8_dequantize(data, scale)
    assert back[1, :2].tolist() == [-INF, 0.0]
    assert back[2, :32].isnan().all()
    assert back[2, 40] == 5.0
    assert (data.view(torch.uint8)[2, :32] == 0x7F).all()


def test_no_finite_input_gives_nan_or_inf() -> None:
    finite = ALL_BF16[ALL_BF16.isfinite()]
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        x = finite[torch.randint(0, len(finite), (256, 128), generator=generator)]
        for data, scale in both(x):
            assert ops.mxfp8_dequantize(data, scale).isfinite().all()
            assert ops.dequantize_to_bfloat16(data, scale).isfinite().all()


def test_the_scale_comes_from_the_values_that_are_quantized() -> None:
    # 448.9 as float32 is 448 once it is bfloat16: no step up of the scale, and nothing clips. A scale from the float32
    # values would be 2. With 449.1 both are 450 or above.
    x = torch.full((128, 128), 448.9)
    (data, scale), _ = both(x.bfloat16())
    assert (scale == 127).all()
    assert (data.view(torch.uint8) == 0x7E).all()
    (_, scale), _ = both(torch.full((128, 128), 449.1).bfloat16())
    assert (scale == 128).all()


def test_elements_are_rounded_once() -> None:
    # Between two codes, a hair beside the middle: a first rounding onto the middle would give the even neighbour.
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    middle = (MAGNITUDE_BITS[:-1] + MAGNITUDE_BITS[1:]) // 2
    hairs = torch.cat([middle - 1, middle, middle + 1]).to(torch.int16).view(torch.bfloat16)
    x[:, ::32] = 448.0
    blocks = x.view(128, 4, 32)
    rows = -(-len(hairs) // 31)
    blocks[:rows, 0, 1:] = (
        torch.nn.functional.pad(hairs.view(torch.int16), (0, rows * 31 - len(hairs)))
        .view(torch.bfloat16)
        .view(rows, 31)
    )
    assert_quantized(x)


MAGNITUDE_BITS = torch.from_numpy(model.MAGNITUDES).bfloat16().view(torch.int16).int()


def test_three_dimensions_views_and_absent_orientations() -> None:
    x = random(3, 256, 128, seed=8)
    data, scale, data_t, scale_t = ops.mxfp8_quantize(x, rowwise=True, columnwise=True)
    assert data is not None and scale is not None and data_t is not None and scale_t is not None
    assert (data.shape, scale.shape) == ((3, 256, 128), (3, 2, 1, 32, 16))
    assert (data_t.shape, scale_t.shape) == ((3, 128, 256), (3, 1, 2, 32, 16))
    for e in range(3):
        (one, one_scale), (one_t, one_scale_t) = both(x[e])
        assert torch.equal(data[e].view(torch.uint8), one.view(torch.uint8)) and torch.equal(scale[e], one_scale)
        assert torch.equal(data_t[e].view(torch.uint8), one_t.view(torch.uint8)) and torch.equal(
            scale_t[e], one_scale_t
        )
    assert torch.equal(ops.mxfp8_dequantize(data, scale)[1], ops.mxfp8_dequantize(data[1], scale[1]))
    # The columnwise quantization of x is the rowwise one of its transpose.
    of_view = ops.mxfp8_quantize(x.mT, rowwise=True, columnwise=False)
    assert of_view[2:] == (None, None)
    assert torch.equal(of_view[0].view(torch.uint8), data_t.view(torch.uint8))
    assert torch.equal(of_view[1], scale_t)
    assert ops.mxfp8_quantize(x, rowwise=False, columnwise=True)[:2] == (None, None)
    assert ops.mxfp8_quantize(x, rowwise=False, columnwise=False) == (None, None, None, None)
    assert ops.mxfp8_quantize(x[:0])[0].shape == (0, 256, 128)
    assert ops.mxfp8_dequantize(data[:0], scale[:0]).shape == (0, 256, 128)


def test_flushed_subnormals_change_nothing() -> None:
    x = random(128, 128, seed=2, scale=1e-38)
    want = [tensor.view(torch.uint8) for tensor in ops.mxfp8_quantize(x, True, True)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        got = ops.mxfp8_quantize(x, True, True)
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(got, want, strict=True))


def test_compiled_in_one_graph() -> None:
    def f(x: Tensor) -> Tensor:
        data, scale, data_t, scale_t = ops.mxfp8_quantize(x, rowwise=True, columnwise=True)
        return ops.mxfp8_dequantize(data, scale) + ops.mxfp8_dequantize(data_t, scale_t).mT

    x = random(2, 128, 256)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))
    for op, args in (
        (ops._quantize, (x, True, True)),
        (ops._dequantize, (*ops._quantize(x, True, False), torch.float32)),
    ):
        torch.library.opcheck(op, args, test_utils="test_faketensor")


def test_fresh_memory_full_of_nan() -> None:
    x = random(128, 128)
    want = [tensor.view(torch.uint8) for tensor in ops.mxfp8_quantize(x, True, True)]
    torch.use_deterministic_algorithms(True)
    try:
        got = ops.mxfp8_quantize(x, True, True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(got, want, strict=True))


def test_what_is_wrong_is_named() -> None:
    x = random(128, 128)
    data, scale, _, _ = ops.mxfp8_quantize(x)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16, got torch\.float16"):
        ops.mxfp8_quantize(x.half())
    for shape in ((128, 64), (100, 128), (2880, 2880)):
        with pytest.raises(ValueError, match="M and N must be multiples of 128"):
            ops.mxfp8_quantize(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"must be \[M, N\] or \[E, M, N\], got \[128\]"):
        ops.mxfp8_quantize(x[0])
    with pytest.raises(TypeError, match=r"data must be torch\.float8_e4m3fn, got torch\.bfloat16"):
        ops.mxfp8_dequantize(x, scale)
    with pytest.raises(TypeError, match=r"scale must be torch\.uint8, got torch\.float32"):
        ops.mxfp8_dequantize(data, scale.float())
    with pytest.raises(ValueError, match=r"scale must be \[1, 1, 32, 16\] for data of shape \[128, 128\]"):
        ops.mxfp8_dequantize(data, scale.view(32, 16))


def test_model_knows_the_format() -> None:
    # The table against torch's own float8 values.
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(codes.double().numpy(), model.MAGNITUDES)
