"""MXFP8 by its definition, for tests: exact rationals and a table of all values, no bit tricks and no conversions.

Shares nothing with the library: a scale is found by trying powers of two, an element by looking for the nearest of
the 127 E4M3 magnitudes (ties to the even code).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 32
MAX_BF16 = float(2**128 - 2**120)

# Magnitudes of the codes 0x00 to 0x7e: subnormals f * 2^-9, then (8 + f) * 2^(e - 10).
MAGNITUDES = np.array(
    [f * 2.0**-9 for f in range(8)] + [(8 + f) * 2.0 ** (e - 10) for e in range(1, 16) for f in range(8)]
)[:127]


def values_of(x: Tensor) -> np.ndarray:
    """bfloat16 as float64, exactly."""
    return x.double().numpy()


@cache
def scale_byte(amax: float) -> int:
    """The smallest power of two, from 2^-127 to 2^127, that is at least amax / 448, as exponent + 127."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    wanted = Fraction(amax) / 448
    byte = 0
    while Fraction(2) ** (byte - 127) < wanted:
        byte += 1
    return byte


def quantize_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [..., 32] of bfloat16 values -> codes uint8 [..., 32] and scale bytes uint8 [...]."""
    amax = np.abs(blocks).max(-1)  # numpy's max hands a NaN on
    scales = np.vectorize(lambda value: scale_byte(float(value)), otypes=[np.uint8])(amax)
    return encode(blocks, scales), scales


def encode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The codes of float64 [..., 32] under given scales [...]; what is too large saturates."""
    with np.errstate(all="ignore"):
        quotient = np.abs(np.ldexp(blocks, 127 - scales[..., None].astype(np.int64)))  # exact: float64 has room
    midpoints = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    above = np.searchsorted(midpoints, quotient, side="right")  # a tie goes up
    below = np.searchsorted(midpoints, quotient, side="left")  # a tie goes down
    codes = np.where(above % 2 == 0, above, below).astype(np.uint8)
    codes |= np.signbit(blocks).astype(np.uint8) << 7
    codes[np.isnan(blocks) | (scales == 255)[..., None]] = 0x7F
    return codes


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 values of codes [..., 32] under scales [...]."""
    byte = np.broadcast_to(scales[..., None].astype(np.int64), codes.shape)
    magnitude = np.append(MAGNITUDES, np.nan)[codes & 0x7F]
    value = np.ldexp(magnitude, byte - 127)
    value = np.where((value >= 2.0**128) & (byte <= 253), MAX_BF16, value)
    value = np.where((value >= 2.0**128) & (byte == 254), np.inf, value)
    value = np.where(byte == 255, np.nan, value)
    return np.where(codes & 0x80, -value, value)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N] bfloat16 -> codes uint8 [M, N] and plain scale bytes uint8 [M, N / 32]."""
    rows, cols = x.shape
    codes, scales = quantize_blocks(values_of(x).reshape(rows, cols // BLOCK, BLOCK))
    return torch.from_numpy(codes.reshape(rows, cols)), torch.from_numpy(scales)


def tiled(scales: Tensor) -> Tensor:
    """Plain scale bytes [M, N / 32] -> [M / 128, N / 128, 32, 16], byte by byte as the layout is defined."""
    rows, blocks = scales.shape
    out = torch.full((rows // 128, blocks // 4, 32, 16), 77, dtype=torch.uint8)
    for r in range(rows):
        for b in range(blocks):
            out[r // 128, b // 4, r % 32, (r % 128) // 32 * 4 + b % 4] = scales[r, b]
    return out


def round_trip(x: Tensor) -> Tensor:
    """x [M, N] bfloat16 after quantization along its rows, bfloat16."""
    rows, cols = x.shape
    codes, scales = quantize_blocks(values_of(x).reshape(rows, cols // BLOCK, BLOCK))
    return torch.from_numpy(dequantize(codes, scales).reshape(rows, cols)).to(x.dtype)
