// Number types that host and device share, bit for bit. No standard headers: this file is also
// read by a run-time compiler that has none.
#pragma once

#include "targets/target.h"

namespace mok {

using int32 = int;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;
static_assert(sizeof(int32) == 4 && sizeof(int64) == 8 && sizeof(uint16) == 2);

struct bf16 {
  uint16 bits;
};

MOK_DEVICE float to_float(bf16 value) { return bits_to_float(uint32{value.bits} << 16); }

// Round to nearest even; a NaN stays a NaN (its top mantissa bit is set, so no payload rounds to Inf).
MOK_DEVICE bf16 to_bf16(float value) {
  const uint32 bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16>((bits >> 16) | 0x40u)};
  return bf16{static_cast<uint16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// What a value becomes when it is stored as BF16 and read again.
MOK_DEVICE float round_to_bf16(float value) { return to_float(to_bf16(value)); }

template <class T>
MOK_DEVICE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
MOK_DEVICE T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
MOK_DEVICE T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace mok
