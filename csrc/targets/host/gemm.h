// The host's GEMM loop: pack, multiply, epilogue. It plays the part of the TMA producer, the tensor
// cores and the epilogue warps, in one place and in order.
#pragma once

#include <vector>

#include "stages/product.h"
#include "targets/host/gemm_kernel.h"
#include "targets/host/worker.h"

namespace mok::host {

struct GemmScratch {
  std::vector<float> accumulators, a_panel, b_panel;
  std::vector<bf16> tile;

  float* start(std::size_t rows, std::size_t cols) {
    accumulators.assign(rows * cols, 0.0f);
    return accumulators.data();
  }
};
// A tile never suspends, so the fibers of a thread can share it.
GemmScratch& gemm_scratch();

// Time and rows of one plane. A stage that lives in the epilogue gets its share, so that tables show it in every plan.
// Rows are counted with one plane of a tile, and with one column tile of a row block.
template <class S>
void count_plane(const Call& call, Worker& worker, const Task& task, const GemmTile& tile, Plane plane, bool is_first,
                 long long begin, long long element_end, long long store_end) {
  const Stage element = S::element_stage(call, plane), store = S::store_stage(call);
  worker.stats(element).busy_ns += element_end - begin;
  worker.stats(store).busy_ns += store_end - element_end;
  const int64 rows = task.part == 0 && is_first ? tile.num_rows : 0;
  const int64 bytes = int64{tile.num_rows} * tile.num_cols * static_cast<int64>(sizeof(bf16));
  if (element != S::kStage) worker.count(element, Cost{rows, bytes, 0});
  if (store != S::kStage) worker.count(store, Cost{rows, bytes, 0});
}

inline MatrixView view_of(const Call& call, const Operand& operand, Major major) {
  const MatrixInMemory matrix = matrix_in_memory(call, operand.matrix);
  return {matrix.base + operand.row * matrix.width + operand.col, matrix.width, major == Major::mn};
}

// Sums, from zero or from where S says.
template <class S>
void multiply_tile(const Call& call, const Task& task, const GemmTile& tile, GemmScratch& scratch) {
  const std::size_t rows = static_cast<std::size_t>(S::tile_rows(call)), cols = S::kNumAccumulators * S::kTileCols;
  float* acc = scratch.start(rows, cols);
  if constexpr (S::kHasSums) {
    const std::size_t pitch = static_cast<std::size_t>(S::start_pitch(tile));
    if (const float* from = S::start(call, task))
      for (std::size_t row = 0; row < rows; ++row)
        std::memcpy(acc + row * cols, from + row * pitch, pitch * sizeof(float));
  }
  for (int product = 0; product < S::kNumProducts; ++product) {
    const Operands operands = S::operands(call, task, tile, product);
    const MatrixView b[2] = {view_of(call, operands.b[0], S::kMajorB), view_of(call, operands.b[1], S::kMajorB)};
    multiply(tile.num_rows, tile.num_cols, S::kNumAccumulators, S::kTileCols, tile.num_k / S::kNumProducts,
             view_of(call, operands.a, S::kMajorA), b, acc, scratch.a_panel, scratch.b_panel);
  }
}

// Accumulators -> BF16 tile of a plane.
template <class S>
void make_plane(const Call& call, const Task& task, const GemmTile& tile, Plane plane, GemmScratch& scratch) {
  scratch.tile.resize(static_cast<std::size_t>(S::tile_rows(call)) * S::kTileCols);
  for (int row = 0; row < tile.num_rows; ++row) {
    for (int col = 0; col < tile.num_cols; col += OneLane::kNum) {
      bf16 rounded[2][OneLane::kNum];
      float acc[2][OneLane::kNum] = {};
      for (int i = 0; i < S::kNumAccumulators; ++i) {
        const float* from = scratch.accumulators.data() + (row * S::kNumAccumulators + i) * S::kTileCols + col;
        for (int j = 0; j < OneLane::kNum; ++j) rounded[i][j] = to_bf16(from[j]);
        for (int j = 0; j < OneLane::kNum; ++j) acc[i][j] = to_float(rounded[i][j]);
      }
      bf16 out[OneLane::kNum];
      const int32 accumulator = S::plane_accumulator(plane);
      if (accumulator < 0) S::element(call, task, plane, row, col, acc[0], acc[1], OneLane{}, out);
      std::memcpy(static_cast<void*>(scratch.tile.data() + row * S::kTileCols + col),
                  accumulator < 0 ? out : rounded[accumulator], sizeof(out));
    }
  }
}

// A tile of any product.
template <class S>
void gemm_tile(const Call& call, Worker& worker, const Task& task) {
  const long long begin = now_ns();
  const GemmTile tile = S::decode(call, task);
  GemmScratch& scratch = gemm_scratch();
  multiply_tile<S>(call, task, tile, scratch);
  worker.stats(S::kStage).busy_ns += now_ns() - begin;

  bool is_first = true;
  for (PlaneList planes = S::planes(call, task); !planes.is_empty(); is_first = false) {
    const Plane plane = planes.pop();
    const long long plane_begin = now_ns();
    long long element_end = plane_begin;
    if constexpr (S::kHasSums) {
      for (int row = 0; row < tile.num_rows; ++row) {
        for (int col = 0; col < tile.num_cols; col += OneLane::kNum) {
          float sums[OneLane::kNum];
          std::memcpy(sums, scratch.accumulators.data() + row * S::kTileCols + col, sizeof(sums));
          S::store_sums(call, task, plane, row, col, sums, OneLane{});
        }
      }
    } else {
      make_plane<S>(call, task, tile, plane, scratch);
      element_end = now_ns();
      S::store(call, worker, task, S::plane_rows(call, task, plane),
               TilePart{0, call.shape.row_block(), 0, tile.num_cols, scratch.tile.data(), S::kTileCols});
    }
    count_plane<S>(call, worker, task, tile, plane, is_first, plane_begin, element_end, now_ns());
  }
}

}  // namespace mok::host
