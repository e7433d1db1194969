"""MXFP8 (OCP MX) as torch operations: E4M3 data, one E8M0 scale byte per 32 elements.

    data, scale, data_t, scale_t = mxfp8_quantize(weight, rowwise=True, columnwise=True)
    values = mxfp8_dequantize(data, scale)

The scale of a block is the smallest power of two that is at least amax / 448, so nothing clips. A block of zeros has
scale byte 0, one with an Inf 254, one with a NaN 255. Elements are divided exactly and rounded to nearest even.
Operations have fake implementations: `torch.compile(fullgraph=True)` traces them. They have no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mok_modular.protocol.extension import extension

TILE = 128
"""M and N of an MXFP8 matrix are multiples of this: 128 rows by 4 scales are one tile of the scale layout."""
BLOCK = 32
"""Elements that share a scale."""


def mxfp8_quantize(
    x: Tensor, rowwise: bool = True, columnwise: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns (data, scale, data_t, scale_t) of x [M, N] or [E, M, N], bfloat16 with M and N multiples of 128.

    rowwise: data [M, N] float8_e4m3fn, one scale per 32 neighbours of a row. columnwise: data_t [N, M], one per 32
    neighbours of a column, from x itself. scale [M/128, N/128, 32, 16] and scale_t [N/128, M/128, 32, 16] are uint8:
    the byte of row r and columns 32*b.. stands at [r // 128, b // 4, r % 32, r % 128 // 32 * 4 + b % 4]. With a
    leading E where x has three dimensions; None where not asked for.

    Raises TypeError for another dtype, ValueError for another shape or device.
    """
    check_quantizable("x", x)
    parts = iter(_quantize(x.contiguous(), rowwise, columnwise))
    data, scale = (next(parts), next(parts)) if rowwise else (None, None)
    data_t, scale_t = (next(parts), next(parts)) if columnwise else (None, None)
    return data, scale, data_t, scale_t


def mxfp8_dequantize(data: Tensor, scale: Tensor) -> Tensor:
    """Returns data * 2^(scale - 127) in float32, [M, N] or [E, M, N] as data; `scale` as mxfp8_quantize gives it.

    Scale bytes up to 253 saturate to the largest finite bfloat16 (an element from 1.9375 * 2^127 up was rounded to
    2^128) and are exact otherwise. 254 is not saturated, so an Inf stays an Inf; 255 makes its whole block NaN.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit or another device.
    """
    check_quantized("data", data, "scale", scale)
    return _dequantize(data.contiguous(), scale.contiguous(), torch.float32)


def dequantize_to_bfloat16(data: Tensor, scale: Tensor) -> Tensor:
    """`mxfp8_dequantize` in bfloat16: the same values, but for those below 2^-133, which are rounded. What targets
    without block-scaled products multiply. Raises what mxfp8_dequantize raises."""
    check_quantized("data", data, "scale", scale)
    return _dequantize(data.contiguous(), scale.contiguous(), torch.bfloat16)


def scale_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of data of this shape, [M, N] or [E, M, N]."""
    *experts, rows, cols = shape
    return (*experts, rows // TILE, cols // TILE, 32, 16)


def check_quantizable(name: str, x: Tensor) -> None:
    """Raises TypeError or ValueError, which names the rule, unless x can be quantized."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{name} must be torch.bfloat16, got {x.dtype}")
    _check_matrix(name, x)


def check_quantized(name: str, data: Tensor, scale_name: str, scale: Tensor) -> None:
    """Raises TypeError or ValueError, which names the rule, unless data and scale fit together."""
    for each, tensor, dtype in ((name, data, torch.float8_e4m3fn), (scale_name, scale, torch.uint8)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{each} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise TypeError(f"{each} must be {dtype}, got {tensor.dtype}")
    _check_matrix(name, data)
    if tuple(scale.shape) != scale_shape(data.shape):
        raise ValueError(
            f"{scale_name} must be {list(scale_shape(data.shape))} for {name} of shape {list(data.shape)}, got "
            f"{list(scale.shape)}"
        )
    if scale.device != data.device:
        raise ValueError(f"{scale_name} must be on the device of {name}, {data.device}, got {scale.device}")


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() not in (2, 3):
        raise ValueError(f"{name} must be [M, N] or [E, M, N], got {list(tensor.shape)}")
    if tensor.shape[-2] % TILE or tensor.shape[-1] % TILE:
        raise ValueError(f"{name}: M and N must be multiples of {TILE} in MXFP8, got {list(tensor.shape)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU in this version, got {tensor.device}")


@torch.library.custom_op("mok_modular::mxfp8_quantize", mutates_args=(), device_types="cpu")
def _quantize(x: Tensor, rowwise: bool, columnwise: bool) -> list[Tensor]:
    out = _empty_quantized(x, rowwise, columnwise)
    pointers = [tensor.data_ptr() for tensor in out]
    row, column = (pointers[:2] if rowwise else [0, 0]), (pointers[-2:] if columnwise else [0, 0])
    if x.numel():
        rows, cols = x.shape[-2:]
        extension().mxfp8_quantize(x.data_ptr(), x.numel() // (rows * cols), rows, cols, *row, *column)
    return out


@_quantize.register_fake
def _empty_quantized(x: Tensor, rowwise: bool, columnwise: bool) -> list[Tensor]:
    out = []
    for shape in [x.shape] * rowwise + [x.mT.shape] * columnwise:
        out += [x.new_empty(shape, dtype=torch.float8_e4m3fn), x.new_empty(scale_shape(shape), dtype=torch.uint8)]
    return out


@torch.library.custom_op("mok_modular::mxfp8_dequantize", mutates_args=(), device_types="cpu")
def _dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = _empty_dequantized(data, scale, dtype)
    if data.numel():
        rows, cols = data.shape[-2:]
        num, is_bf16 = data.numel() // (rows * cols), dtype == torch.bfloat16
        extension().mxfp8_dequantize(data.data_ptr(), scale.data_ptr(), num, rows, cols, out.data_ptr(), is_bf16)
    return out


@_dequantize.register_fake
def _empty_dequantized(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return data.new_empty(data.shape, dtype=dtype)


def round_trip(values: Tensor, dim: int = -1) -> Tensor:
    """Bfloat16 values after MXFP8 quantization with blocks of 32 along `dim`, whose size is a multiple of 32."""
    blocks = values.movedim(dim, -1).unflatten(-1, (-1, BLOCK)).double()  # every step below is exact in float64
    amax = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / 448)  # mantissa from 0.5 up to 1
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    exponent = torch.where(amax == 0, -127, torch.where(amax.isfinite(), exponent, 127))
    elements = torch.ldexp(blocks, -exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    back = torch.ldexp(elements.double(), exponent)
    largest = torch.finfo(torch.bfloat16).max
    back = torch.where(amax.isinf(), back, back.clamp(-largest, largest))
    back = torch.where(amax.isnan(), torch.nan, back)
    return back.to(values.dtype).flatten(-2).movedim(-1, dim)
