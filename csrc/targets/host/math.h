// Host arithmetic. The library is compiled with -ffp-contract=off, so a*b+c is two roundings
// and fmaf_f32 is one, everywhere.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace mok {

inline float bits_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t float_to_bits(float value) { return std::bit_cast<std::uint32_t>(value); }

// The one exponential and the one reciprocal of the host target.
inline float exp_f32(float value) { return std::exp(value); }
inline float rcp_f32(float value) { return 1.0f / value; }
inline float fmaf_f32(float a, float b, float c) { return std::fma(a, b, c); }

}  // namespace mok
