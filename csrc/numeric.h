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

// Round to nearest even; a NaN stays a NaN.
MOK_DEVICE bf16 to_bf16(float value) { return bf16{float_to_bf16_bits(value)}; }

// Eight neighbouring elements, moved as one 16-byte word.
struct alignas(16) bf16x8 {
  uint32 pairs[4];
};
MOK_DEVICE float element(const bf16x8& vector, int32 i) {
  const uint32 pair = vector.pairs[i / 2];
  return bits_to_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}
MOK_DEVICE uint32 pack(bf16 low, bf16 high) { return uint32{low.bits} | uint32{high.bits} << 16; }
// The bits of its elements, one a word: loops over them become vector instructions on a CPU.
struct Lanes8 {
  uint32 bits[8];
};
MOK_DEVICE Lanes8 unpack(const bf16x8& vector) {
  Lanes8 lanes;
  MOK_UNROLL
  for (int32 i = 0; i < 4; ++i) {
    lanes.bits[2 * i] = vector.pairs[i] & 0xffffu;
    lanes.bits[2 * i + 1] = vector.pairs[i] >> 16;
  }
  return lanes;
}
MOK_DEVICE bf16x8 pack(const Lanes8& lanes) {
  bf16x8 vector;
  MOK_UNROLL
  for (int32 i = 0; i < 4; ++i) vector.pairs[i] = lanes.bits[2 * i] | lanes.bits[2 * i + 1] << 16;
  return vector;
}

// torch.clamp's comparisons: a NaN stays a NaN.
MOK_DEVICE float clamp_above(float value, float limit) { return value > limit ? limit : value; }
MOK_DEVICE float clamp_both(float value, float limit) {
  return value > limit ? limit : value < -limit ? -limit : value;
}

// The sum of 32 neighbouring columns in a fixed tree: pairs; then the four pairs that are 8 columns apart; then
// the four sums that are left. A warp's quad of lanes holds an accumulator row like that.
MOK_DEVICE float sum_of_columns(const float (&values)[32]) {
  float quads[4];
  MOK_UNROLL
  for (int32 q = 0; q < 4; ++q) {
    float pairs[4];
    MOK_UNROLL
    for (int32 j = 0; j < 4; ++j) pairs[j] = values[8 * j + 2 * q] + values[8 * j + 2 * q + 1];
    quads[q] = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
  }
  return (quads[0] + quads[1]) + (quads[2] + quads[3]);
}

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
