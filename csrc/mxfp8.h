// MXFP8 (OCP MX): E4M3 elements, one E8M0 scale for 32 of them along the axis that a product sums over.
//
// The scale is the smallest power of two that is at least amax / 448, so nothing clips; it comes from the BF16 bits
// of amax by integers. Elements are divided exactly, so the conversion rounds once. Every function here is integers
// and normal floats only: the bits do not depend on the target, nor on whether it flushes subnormals.
#pragma once

#include "numeric.h"

namespace mok {

constexpr int kMxBlock = 32;       // elements of one scale
constexpr int kMxTile = 128;       // sizes are multiples of this: rows and columns of a tile of scales
constexpr int kMxTileBytes = 512;  // scales of 128 x 128 elements

constexpr uint32 kMxScaleInf = 254, kMxScaleNan = 255;
constexpr uint32 kE4m3Max = 0x7e, kE4m3Nan = 0x7f;
constexpr uint32 kBf16Max = 0x7f7f, kBf16Inf = 0x7f80, kBf16Nan = 0x7fc0;

// Magnitudes compare as integers: NaN above Inf above finite. The largest of a block is its amax.
MOK_DEVICE uint32 magnitude(uint32 bits) { return bits & 0x7fffu; }
MOK_DEVICE uint32 magnitude(bf16 value) { return magnitude(uint32{value.bits}); }
MOK_DEVICE uint32 max_magnitude(const Lanes8& lanes) {
  uint32 amax = 0;
  MOK_UNROLL
  for (int32 i = 0; i < 8; ++i) amax = max_of(amax, magnitude(lanes.bits[i]));
  return amax;
}

// The scale byte of a block, exponent + 127. Zeros: 0. Inf: 254. NaN: 255.
MOK_DEVICE uint32 mx_scale(uint32 amax) {
  const int32 exponent = static_cast<int32>(amax >> 7);
  const int32 byte =
      max_of(0, exponent - 8 + ((amax & 0x7fu) > 0x60u ? 1 : 0));  // a mantissa above 1.75 needs one more
  const uint32 finite = static_cast<uint32>(byte);
  return amax > kBf16Inf ? kMxScaleNan : amax == kBf16Inf ? kMxScaleInf : finite;
}

// |value| / 2^(scale - 127), exactly; where that is beyond E4M3 at either end, something else beyond it. Not of an Inf.
MOK_DEVICE float mx_quotient(uint32 amount, uint32 scale) {
  const int32 exponent = static_cast<int32>(amount >> 7);
  const int32 significand = static_cast<int32>(amount & 0x7fu) | (exponent > 0 ? 0x80 : 0);
  const int32 shift = min_of(30, max_of(-30, max_of(exponent, 1) - static_cast<int32>(scale) - 7));
  return static_cast<float>(significand) * bits_to_float(static_cast<uint32>(127 + shift) << 23);
}
// E4M3 keeps three bits of a normal number's mantissa. Below 2^-6 one step is 2^-9, the last bit of 2^14 as a float.
constexpr uint32 kFirstDroppedBits = 0x7ffffu, kKeptBits = 0xfff00000u, k448 = 0x43e00000u;
constexpr float kSmallestNormal = 0.015625f, kSubnormalRounder = 16384.0f;
MOK_DEVICE uint32 add_half_of_dropped(uint32 bits) { return bits + kFirstDroppedBits + (bits >> 20 & 1u); }

// value / 2^(scale - 127) to E4M3, nearest even, saturating. Keeps the sign of zero; NaN, or any value under a NaN
// scale, is 0x7f.
MOK_DEVICE uint32 to_e4m3(bf16 value, uint32 scale) {
  const uint32 amount = magnitude(value), sign = uint32{value.bits} >> 8 & 0x80u;
  const float quotient = mx_quotient(amount, scale);
  const uint32 normal = (add_half_of_dropped(float_to_bits(quotient)) >> 20) - (120u << 3);
  const uint32 subnormal = float_to_bits(quotient + kSubnormalRounder) - float_to_bits(kSubnormalRounder);
  uint32 code = min_of(quotient < kSmallestNormal ? subnormal : normal, kE4m3Max);
  if (amount >= kBf16Inf) code = kE4m3Max;
  return amount > kBf16Inf || scale == kMxScaleNan ? kE4m3Nan : code | sign;
}

// Bits of element * 2^(scale - 127) as an FP32 number. Scales up to 253 saturate to the largest finite BF16 and are
// exact otherwise; 254 is not saturated, so that an Inf stays one; 255 makes everything NaN.
MOK_DEVICE uint32 from_e4m3_bits(uint32 code, uint32 scale) {
  const uint32 amount = code & 0x7fu, sign = (code & 0x80u) << 24;
  const int32 exponent = static_cast<int32>(amount >> 3);
  const int32 significand = static_cast<int32>(amount & 7u) | (exponent > 0 ? 8 : 0);
  const uint32 bits = float_to_bits(static_cast<float>(significand));
  const int32 power = static_cast<int32>(bits >> 23) + max_of(exponent, 1) - 10 + static_cast<int32>(scale) - 127;
  const uint32 mantissa = bits & 0x7fffffu;
  // Subnormal: at most ten places to the right, and four bits are all there are.
  const uint32 small = (mantissa | 0x800000u) >> min_of(24, max_of(0, 1 - power));
  uint32 result = power > 0 ? static_cast<uint32>(power) << 23 | mantissa : small;
  if (power >= 255) result = (scale == kMxScaleInf ? kBf16Inf : kBf16Max) << 16;
  if (significand == 0) result = 0;
  return amount == kE4m3Nan || scale == kMxScaleNan ? kBf16Nan << 16 : result | sign;
}
MOK_DEVICE float from_e4m3_f32(uint32 code, uint32 scale) { return bits_to_float(from_e4m3_bits(code, scale)); }
MOK_DEVICE bf16 from_e4m3(uint32 code, uint32 scale) {
  const uint32 bits = from_e4m3_bits(code, scale);
  return bf16{static_cast<uint16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // below 2^-133 it rounds
}

// What is left of a value after quantization, bits of BF16: what a target without block-scaled products multiplies. The
// same as from_e4m3(to_e4m3(value, scale), scale) without a code in between; a test holds one against the other.
MOK_DEVICE uint32 round_trip(uint32 bits, uint32 scale) {
  const uint32 amount = magnitude(bits);
  const float quotient = mx_quotient(amount, scale);
  const uint32 normal = min_of(add_half_of_dropped(float_to_bits(quotient)) & kKeptBits, k448);
  const uint32 subnormal = float_to_bits((quotient + kSubnormalRounder) - kSubnormalRounder);
  uint32 rounded = quotient < kSmallestNormal ? subnormal : normal;
  if (amount >= kBf16Inf) rounded = k448;
  // Times the scale: only the exponent changes, or a subnormal's place.
  const int32 power = static_cast<int32>(rounded >> 23) + static_cast<int32>(scale) - 127;
  const uint32 mantissa = rounded >> 16 & 0x7fu;
  const uint32 small = (mantissa | 0x80u) >> min_of(15, max_of(0, 1 - power));
  uint32 result = power > 0 ? static_cast<uint32>(power) << 7 | mantissa : small;
  if (power >= 255) result = scale == kMxScaleInf ? kBf16Inf : kBf16Max;
  if (rounded == 0) result = 0;
  return amount > kBf16Inf || scale == kMxScaleNan ? kBf16Nan : result | (bits & 0x8000u);
}

// The same for a whole block, four neighbouring vectors; in place too.
MOK_DEVICE void round_trip(const bf16x8* from, bf16x8* to) {
  constexpr int kVectors = kMxBlock / 8;
  Lanes8 block[kVectors];
  uint32 amax = 0;
  MOK_UNROLL
  for (int32 v = 0; v < kVectors; ++v) {
    block[v] = unpack(from[v]);
    amax = max_of(amax, max_magnitude(block[v]));
  }
  const uint32 scale = mx_scale(amax);
  MOK_UNROLL
  for (int32 v = 0; v < kVectors; ++v) {
    MOK_UNROLL
    for (int32 i = 0; i < 8; ++i) block[v].bits[i] = round_trip(block[v].bits[i], scale);
    to[v] = pack(block[v]);
  }
}

// A block that the calling lanes hold together, Lanes::kNum values each; in place.
template <class Lanes>
MOK_DEVICE void round_trip(const Lanes& lanes, bf16 (&values)[Lanes::kNum]) {
  uint32 amax = 0;
  MOK_UNROLL
  for (int32 i = 0; i < Lanes::kNum; ++i) amax = max_of(amax, magnitude(values[i]));
  const uint32 scale = mx_scale(lanes.max(amax));
  MOK_UNROLL
  for (int32 i = 0; i < Lanes::kNum; ++i)
    values[i].bits = static_cast<uint16>(round_trip(uint32{values[i].bits}, scale));
}

// Where the scale of (row, column block of 32) stands in the tcgen05 layout [rows / 128, cols / 128, 32, 16].
MOK_DEVICE int64 mx_scale_offset(int64 row, int64 block, int64 num_cols) {
  const int64 tile = row / kMxTile * (num_cols / kMxTile) + block / 4;
  return tile * kMxTileBytes + row % 32 * 16 + row % kMxTile / 32 * 4 + block % 4;
}

}  // namespace mok
