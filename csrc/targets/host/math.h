// Host arithmetic. The library is compiled with -ffp-contract=off, so a*b+c is two roundings
// and fmaf_f32 is one, everywhere.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace mok {

inline float bits_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t float_to_bits(float value) { return std::bit_cast<std::uint32_t>(value); }

// The top mantissa bit of a NaN is set, so that no payload rounds to Inf.
inline std::uint16_t float_to_bf16_bits(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The one exponential and the one reciprocal of the host target.
inline float exp_f32(float value) { return std::exp(value); }
inline float rcp_f32(float value) { return 1.0f / value; }
inline float fmaf_f32(float a, float b, float c) { return std::fma(a, b, c); }

}  // namespace mok
