// The host's GEMM loop: pack, multiply, epilogue. It plays the part of the TMA producer, the tensor
// cores and the epilogue warps, in one place and in order.
#pragma once

#include <vector>

#include "stages/grouped_dgrad.h"
#include "stages/grouped_gemm.h"
#include "stages/wgrad.h"
#include "targets/host/gemm_kernel.h"
#include "targets/host/worker.h"

namespace mok::host {

// All 32 columns of an epilogue call are in one lane here.
struct OneLane {
  static constexpr int kNum = 32;
  int32 column(int32 i) const { return i; }
  bool is_first() const { return true; }
  uint32 max(uint32 value) const { return value; }
  float sum(const float (&values)[kNum]) const { return sum_of_columns(values); }
};

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
struct PlaneStages {
  Stage element, store;
  bool counts_rows;
};
inline void count_plane(Worker& worker, const Task& task, const GemmTile& tile, const PlaneStages& stages, Stage own,
                        long long begin, long long element_end, long long store_end) {
  worker.stats(stages.element).busy_ns += element_end - begin;
  worker.stats(stages.store).busy_ns += store_end - element_end;
  const int64 rows = task.part == 0 && stages.counts_rows ? tile.num_rows : 0;
  const int64 bytes = int64{tile.num_rows} * tile.num_cols * static_cast<int64>(sizeof(bf16));
  if (stages.element != own) worker.count(stages.element, Cost{rows, bytes, 0});
  if (stages.store != own) worker.count(stages.store, Cost{rows, bytes, 0});
}

// Accumulators -> BF16 tile of a plane -> where it belongs. `element(row, col, out)` does 32 columns.
template <class S, class Element>
void store_plane(const Call& call, Worker& worker, const Task& task, const GemmTile& tile, bf16* rows,
                 const PlaneStages& stages, Element&& element) {
  GemmScratch& scratch = gemm_scratch();
  scratch.tile.resize(static_cast<std::size_t>(call.shape.row_block()) * S::kTileCols);
  const long long begin = now_ns();
  for (int row = 0; row < tile.num_rows; ++row) {
    for (int col = 0; col < tile.num_cols; col += OneLane::kNum) {
      bf16 out[OneLane::kNum];
      element(row, col, out);
      std::memcpy(static_cast<void*>(scratch.tile.data() + row * S::kTileCols + col), out, sizeof(out));
    }
  }
  const long long element_end = now_ns();
  S::store(call, worker, task, rows,
           TilePart{0, call.shape.row_block(), 0, tile.num_cols, scratch.tile.data(), S::kTileCols});
  count_plane(worker, task, tile, stages, S::kStage, begin, element_end, now_ns());
}

// gate_up, down and the shared expert's.
template <class S>
void gemm_tile(const Call& call, Worker& worker, const Task& task) {
  constexpr int kAccCols = S::kNumAccumulators * S::kTileCols;
  const long long begin = now_ns();
  const GemmTile tile = S::decode(call, task);
  const Operands operands = S::operands(call, task, tile);
  const int64 k = tile.num_k;
  const MatrixView a{matrix_base(call, operands.a) + operands.a_row * k, k, false};
  const MatrixView b[2] = {{matrix_base(call, operands.b[0]) + operands.b_row * k, k, false},
                           {matrix_base(call, operands.b[1]) + operands.b_row * k, k, false}};
  GemmScratch& scratch = gemm_scratch();
  float* acc = scratch.start(static_cast<std::size_t>(call.shape.row_block()), kAccCols);
  multiply(tile.num_rows, tile.num_cols, S::kNumAccumulators, S::kTileCols, k, a, b, acc, scratch.a_panel,
           scratch.b_panel);
  worker.stats(S::kStage).busy_ns += now_ns() - begin;

  PlaneList planes = S::planes(call, task);
  while (!planes.is_empty()) {
    const Plane plane = planes.pop();
    const PlaneStages stages{S::kStage == Stage::gate_up && plane == Plane::hidden ? Stage::swiglu : S::kStage,
                             S::kStage == Stage::down && is_combine_in_down(call) ? Stage::combine : S::kStage, true};
    store_plane<S>(call, worker, task, tile, S::plane_rows(call, task, plane), stages,
                   [&](int row, int col, bf16(&out)[OneLane::kNum]) {
                     float acc0[OneLane::kNum], acc1[OneLane::kNum] = {};
                     const float* from = acc + int64{row} * kAccCols + col;
                     std::memcpy(acc0, from, sizeof(acc0));
                     if constexpr (S::kNumAccumulators == 2) std::memcpy(acc1, from + S::kTileCols, sizeof(acc1));
                     S::element(call, plane, acc0, acc1, OneLane{}, out);
                   });
  }
}

// The dgrads: one accumulator, one or two products, weights with k as their rows.
template <class S>
void dgrad_tile(const Call& call, Worker& worker, const Task& task) {
  const long long begin = now_ns();
  const GemmTile tile = S::decode(call, task);
  GemmScratch& scratch = gemm_scratch();
  float* acc = scratch.start(static_cast<std::size_t>(call.shape.row_block()), S::kTileCols);
  for (int product = 0; product < S::kNumProducts; ++product) {
    const DgradOperands operands = S::operands(call, task, tile, product);
    const MatrixView b[2] = {{operands.b, operands.b_pitch, true}, {}};
    multiply(tile.num_rows, tile.num_cols, 1, S::kTileCols, tile.num_k, {operands.a, operands.a_pitch, false}, b, acc,
             scratch.a_panel, scratch.b_panel);
  }
  worker.stats(S::kStage).busy_ns += now_ns() - begin;

  for (int i = 0; i < S::num_planes(call); ++i) {
    const DgradPlane plane = S::plane(call, i);
    const bool is_swiglu = S::kStage == Stage::down_dgrad && S::is_swiglu_backward_here(call);
    const bool is_pushed = S::kStage == Stage::gate_up_dgrad && is_reverse_dispatch_in_gate_up_dgrad(call);
    const PlaneStages stages{is_swiglu ? Stage::swiglu_backward : S::kStage,
                             is_pushed ? Stage::reverse_dispatch : S::kStage, i == 0};
    store_plane<S>(call, worker, task, tile, S::plane_rows(call, task, plane), stages,
                   [&](int row, int col, bf16(&out)[OneLane::kNum]) {
                     float sums[OneLane::kNum];
                     std::memcpy(sums, acc + int64{row} * S::kTileCols + col, sizeof(sums));
                     S::element(call, task, plane, row, tile.first_col + col, sums, OneLane{}, out);
                   });
  }
}

// A tile of a weight gradient: sums over rows, from zero or from where the macrobatch before stopped.
template <class S>
void wgrad_tile(const Call& call, Worker& worker, const Task& task) {
  const long long begin = now_ns();
  const WgradTile tile = S::decode(call, task);
  GemmScratch& scratch = gemm_scratch();
  float* acc = scratch.start(kWgradRows, kWgradCols);
  static_assert(kWgradCols == kCarryCols, "a tile is one unit of the carry");
  constexpr std::size_t kTileBytes = std::size_t{kWgradRows} * kWgradCols * sizeof(float);
  if (const float* carry = S::carry_in(call, task)) std::memcpy(acc, carry, kTileBytes);
  const MatrixView b[2] = {{tile.b, tile.b_pitch, true}, {}};
  multiply(tile.num_rows, tile.num_cols, 1, kWgradCols, task.num_rows, {tile.a, tile.a_pitch, true}, b, acc,
           scratch.a_panel, scratch.b_panel);
  if (float* carry = S::carry_out(call, task)) {
    std::memcpy(carry, acc, kTileBytes);
  } else {
    for (int row = 0; row < tile.num_rows; ++row) {
      for (int col = 0; col < tile.num_cols; col += OneLane::kNum) {
        float sums[OneLane::kNum];
        std::memcpy(sums, acc + int64{row} * kWgradCols + col, sizeof(sums));
        S::element(call, task, tile, row, col, sums, OneLane{});
      }
    }
  }
  worker.stats(S::kStage).busy_ns += now_ns() - begin;
}

}  // namespace mok::host
