// Whole matrices in MXFP8, for mok_modular/ops.py: the conversions are those of the stages (mxfp8.h).
#include "mxfp8.h"

#include <nanobind/nanobind.h>

#include <cstring>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace mok::host {
namespace {

using Byte = unsigned char;

// One scale for 32 neighbours of a row. data [rows, cols]; scale [rows / 128, cols / 128, 32, 16].
void quantize_rows(const bf16* x, int64 rows, int64 cols, Byte* data, Byte* scale) {
  for (int64 row = 0; row < rows; ++row) {
    for (int64 block = 0; block < cols / kMxBlock; ++block) {
      const bf16* from = x + row * cols + block * kMxBlock;
      uint32 amax = 0;
      for (int i = 0; i < kMxBlock; ++i) amax = max_of(amax, magnitude(from[i]));
      const uint32 byte = mx_scale(amax);
      Byte* to = data + row * cols + block * kMxBlock;
      for (int i = 0; i < kMxBlock; ++i) to[i] = static_cast<Byte>(to_e4m3(from[i], byte));
      scale[mx_scale_offset(row, block, cols)] = static_cast<Byte>(byte);
    }
  }
}

// One scale for 32 neighbours of a column. The result is transposed: data [cols, rows], scale [cols / 128, rows / 128, 32, 16].
void quantize_columns(const bf16* x, int64 rows, int64 cols, Byte* data, Byte* scale) {
  std::vector<uint32> amax(static_cast<std::size_t>(cols));
  for (int64 block = 0; block < rows / kMxBlock; ++block) {
    const bf16* from = x + block * kMxBlock * cols;
    std::fill(amax.begin(), amax.end(), 0u);
    for (int i = 0; i < kMxBlock; ++i)
      for (int64 col = 0; col < cols; ++col)
        amax[static_cast<std::size_t>(col)] =
            max_of(amax[static_cast<std::size_t>(col)], magnitude(from[i * cols + col]));
    for (int64 col = 0; col < cols; ++col) {
      const uint32 byte = mx_scale(amax[static_cast<std::size_t>(col)]);
      Byte* to = data + col * rows + block * kMxBlock;
      for (int i = 0; i < kMxBlock; ++i) to[i] = static_cast<Byte>(to_e4m3(from[i * cols + col], byte));
      scale[mx_scale_offset(col, block, rows)] = static_cast<Byte>(byte);
    }
  }
}

// `num` matrices [rows, cols], one after the other. Null pointers: that orientation is not wanted.
void quantize(std::uintptr_t x, int64 num, int64 rows, int64 cols, std::uintptr_t data, std::uintptr_t scale,
              std::uintptr_t data_t, std::uintptr_t scale_t) {
  const int64 elements = rows * cols, scales = elements / kMxBlock;
  for (int64 i = 0; i < num; ++i) {
    const bf16* from = reinterpret_cast<const bf16*>(x) + i * elements;
    if (data)
      quantize_rows(from, rows, cols, reinterpret_cast<Byte*>(data) + i * elements,
                    reinterpret_cast<Byte*>(scale) + i * scales);
    if (data_t)
      quantize_columns(from, rows, cols, reinterpret_cast<Byte*>(data_t) + i * elements,
                       reinterpret_cast<Byte*>(scale_t) + i * scales);
  }
}

template <class F>
void for_each_element(std::uintptr_t data, std::uintptr_t scale, int64 num, int64 rows, int64 cols, F&& f) {
  const Byte* codes = reinterpret_cast<const Byte*>(data);
  const Byte* scales = reinterpret_cast<const Byte*>(scale);
  for (int64 row = 0; row < num * rows; ++row) {  // rows are whole tiles, so matrices simply follow one another
    for (int64 block = 0; block < cols / kMxBlock; ++block) {
      const uint32 byte = scales[mx_scale_offset(row, block, cols)];
      const int64 first = row * cols + block * kMxBlock;
      for (int i = 0; i < kMxBlock; ++i) f(first + i, uint32{codes[first + i]}, byte);
    }
  }
}

void dequantize(std::uintptr_t data, std::uintptr_t scale, int64 num, int64 rows, int64 cols, std::uintptr_t out,
                bool is_bf16) {
  if (is_bf16) {
    bf16* to = reinterpret_cast<bf16*>(out);
    for_each_element(data, scale, num, rows, cols,
                     [to](int64 i, uint32 code, uint32 byte) { to[i] = from_e4m3(code, byte); });
  } else {
    uint32* to = reinterpret_cast<uint32*>(out);
    for_each_element(data, scale, num, rows, cols,
                     [to](int64 i, uint32 code, uint32 byte) { to[i] = from_e4m3_bits(code, byte); });
  }
}

// What stages leave of `num` values under one scale, for tests: whatever amax they would have had.
void round_trip_values(std::uintptr_t x, int64 num, uint32 scale, std::uintptr_t out) {
  for (int64 i = 0; i < num; ++i)
    reinterpret_cast<uint16*>(out)[i] =
        static_cast<uint16>(round_trip(uint32{reinterpret_cast<const uint16*>(x)[i]}, scale));
}

}  // namespace

void bind_mxfp8(nb::module_& m) {
  m.def("mxfp8_quantize", &quantize, "x"_a, "num"_a, "rows"_a, "cols"_a, "data"_a, "scale"_a, "data_t"_a, "scale_t"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("mxfp8_dequantize", &dequantize, "data"_a, "scale"_a, "num"_a, "rows"_a, "cols"_a, "out"_a, "is_bf16"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("mxfp8_round_trip", &round_trip_values, "x"_a, "num"_a, "scale"_a, "out"_a);
}

}  // namespace mok::host
