// The host's multiply, and the only file compiled with -ffp-contract=fast: `acc += a * b` on
// vectors is meant as a fused multiply-add wherever the processor has one.
//
// Measured on one core of an AVX-512 server (Zen 4 class): see docs/status.md.
#include "targets/host/gemm_kernel.h"

#include <cstring>

namespace mok::host {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 6, kVectors = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kRows = 6, kVectors = 2;
#else
constexpr int kVectorBytes = 16, kRows = 4, kVectors = 4;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int kPanelCols = kLanes * kVectors;  // columns of one register tile
constexpr int kChunk = 256;                    // k range of one packed panel: A and B stay in the L2
typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef uint32 Pairs __attribute__((vector_size(kVectorBytes)));

// kNumRows x kPanelCols of the result, over one chunk of k.
template <int kNumRows>
void micro(int k, const float* a, int a_pitch, const float* b, float* acc, int acc_pitch) {
  Vector sum[kNumRows][kVectors];
  for (int r = 0; r < kNumRows; ++r)
    for (int v = 0; v < kVectors; ++v) std::memcpy(&sum[r][v], acc + r * acc_pitch + v * kLanes, kVectorBytes);
  for (int i = 0; i < k; ++i) {
    Vector bv[kVectors];
    for (int v = 0; v < kVectors; ++v) std::memcpy(&bv[v], b + i * kPanelCols + v * kLanes, kVectorBytes);
    for (int r = 0; r < kNumRows; ++r) {
      const Vector av = a[r * a_pitch + i] - Vector{};
      for (int v = 0; v < kVectors; ++v) sum[r][v] += av * bv[v];
    }
  }
  for (int r = 0; r < kNumRows; ++r)
    for (int v = 0; v < kVectors; ++v) std::memcpy(acc + r * acc_pitch + v * kLanes, &sum[r][v], kVectorBytes);
}

// b_panel[panel][k][kPanelCols] from B[cols, k]: two k at a time, as the halves of 32-bit words.
void pack_b(const bf16* b, int64 pitch, int num_cols, int k, float* panel) {
  for (int first = 0; first < num_cols; first += kPanelCols) {
    float* to = panel + int64{first} * k;
    for (int v = 0; v < kVectors; ++v) {
      const bf16* row[kLanes];
      const int valid = min_of(kLanes, num_cols - first - v * kLanes);
      for (int lane = 0; lane < kLanes; ++lane)  // columns past the end repeat one: computed, never stored
        row[lane] = b + int64{first + v * kLanes + (lane < valid ? lane : 0)} * pitch;
      if (valid <= 0) break;
      for (int i = 0; i < k; i += 2) {
        Pairs pair;
        for (int lane = 0; lane < kLanes; ++lane) {
          uint32 word;
          std::memcpy(&word, row[lane] + i, sizeof(word));
          pair[lane] = word;
        }
        const Pairs even = pair << 16, odd = pair & 0xffff0000u;
        std::memcpy(to + int64{i} * kPanelCols + v * kLanes, &even, kVectorBytes);
        std::memcpy(to + int64{i + 1} * kPanelCols + v * kLanes, &odd, kVectorBytes);
      }
    }
  }
}

// The same from B[k, cols].
void pack_transposed_b(const bf16* b, int64 pitch, int num_cols, int k, float* panel) {
  for (int first = 0; first < num_cols; first += kPanelCols) {
    float* to = panel + int64{first} * k;
    const int valid = min_of(kPanelCols, num_cols - first);
    for (int i = 0; i < k; ++i) {
      const bf16* row = b + i * pitch + first;
      for (int col = 0; col < valid; ++col) to[int64{i} * kPanelCols + col] = to_float(row[col]);
      for (int col = valid; col < kPanelCols; ++col) to[int64{i} * kPanelCols + col] = 0.0f;
    }
  }
}

void pack_a(const MatrixView& a, int64 first_k, int num_rows, int k, float* panel) {
  if (!a.is_transposed) {
    for (int row = 0; row < num_rows; ++row)
      for (int i = 0; i < k; ++i) panel[row * kChunk + i] = to_float(a.data[row * a.pitch + first_k + i]);
    return;
  }
  for (int i = 0; i < k; ++i)
    for (int row = 0; row < num_rows; ++row) panel[row * kChunk + i] = to_float(a.data[(first_k + i) * a.pitch + row]);
}

}  // namespace

void multiply(int num_rows, int num_cols, int num_b, int pitch, int64 k, const MatrixView& a, const MatrixView (&b)[2],
              float* acc, std::vector<float>& a_panel, std::vector<float>& b_panel) {
  const int acc_pitch = num_b * pitch;
  const int num_panels = ceil_div(num_cols, kPanelCols);
  a_panel.resize(static_cast<std::size_t>(ceil_div(num_rows, kRows) * kRows) * kChunk);
  b_panel.resize(static_cast<std::size_t>(num_panels) * kPanelCols * kChunk);
  for (int64 first_k = 0; first_k < k; first_k += kChunk) {
    const int chunk = static_cast<int>(min_of(int64{kChunk}, k - first_k));
    pack_a(a, first_k, num_rows, chunk, a_panel.data());
    for (int which = 0; which < num_b; ++which) {
      if (b[which].is_transposed)
        pack_transposed_b(b[which].data + first_k * b[which].pitch, b[which].pitch, num_cols, chunk, b_panel.data());
      else
        pack_b(b[which].data + first_k, b[which].pitch, num_cols, chunk, b_panel.data());
      for (int panel = 0; panel < num_panels; ++panel) {
        const float* bp = b_panel.data() + int64{panel} * kPanelCols * chunk;
        float* to = acc + which * pitch + panel * kPanelCols;
        int row = 0;
        for (; row + kRows <= num_rows; row += kRows)
          micro<kRows>(chunk, a_panel.data() + row * kChunk, kChunk, bp, to + int64{row} * acc_pitch, acc_pitch);
        for (; row < num_rows; ++row)
          micro<1>(chunk, a_panel.data() + row * kChunk, kChunk, bp, to + int64{row} * acc_pitch, acc_pitch);
      }
    }
  }
}

}  // namespace mok::host
