// The host's GEMM loop: pack, multiply, epilogue. It plays the part of the TMA producer, the tensor
// cores and the epilogue warps, in one place and in order.
#pragma once

#include <vector>

#include "stages/grouped_gemm.h"
#include "targets/host/gemm_kernel.h"
#include "targets/host/worker.h"

namespace mok::host {

// All 32 columns of an epilogue call are in one lane here.
struct OneLane {
  static constexpr int kNum = 32;
  int32 column(int32 i) const { return i; }
};

struct GemmScratch {
  std::vector<float> accumulators, a_panel, b_panel;
  std::vector<bf16> tile;
};
// A tile never suspends, so the fibers of a thread can share it.
GemmScratch& gemm_scratch();

template <class S>
void gemm_tile(const Call& call, Worker& worker, const Task& task) {
  constexpr int kAccCols = S::kNumAccumulators * S::kTileCols;
  const long long begin = now_ns();
  const GemmTile tile = S::decode(call, task);
  const Operands operands = S::operands(call, task, tile);
  const int64 k = tile.num_k;
  const bf16* a = matrix_base(call, operands.a) + operands.a_row * k;
  const bf16* b[2] = {matrix_base(call, operands.b[0]) + operands.b_row * k,
                      matrix_base(call, operands.b[1]) + operands.b_row * k};

  GemmScratch& scratch = gemm_scratch();
  scratch.accumulators.assign(static_cast<std::size_t>(call.shape.row_block()) * kAccCols, 0.0f);
  scratch.tile.resize(static_cast<std::size_t>(call.shape.row_block()) * S::kTileCols);
  float* acc = scratch.accumulators.data();
  multiply(tile.num_rows, tile.num_cols, S::kNumAccumulators, S::kTileCols, k, a, b, acc, scratch.a_panel,
           scratch.b_panel);

  const long long mainloop_end = now_ns();
  worker.stats(S::kStage).busy_ns += mainloop_end - begin;
  long long last = mainloop_end;
  PlaneList planes = S::planes(call, task);
  while (!planes.is_empty()) {
    const Plane plane = planes.pop();
    for (int32 row = 0; row < tile.num_rows; ++row) {
      for (int32 col = 0; col < tile.num_cols; col += OneLane::kNum) {
        float acc0[OneLane::kNum], acc1[OneLane::kNum] = {};
        bf16 out[OneLane::kNum];
        const float* from = acc + int64{row} * kAccCols + col;
        std::memcpy(acc0, from, sizeof(acc0));
        if constexpr (S::kNumAccumulators == 2) std::memcpy(acc1, from + S::kTileCols, sizeof(acc1));
        S::element(call, plane, acc0, acc1, OneLane{}, out);
        std::memcpy(static_cast<void*>(scratch.tile.data() + row * S::kTileCols + col), out, sizeof(out));
      }
    }
    const long long element_end = now_ns();
    const TilePart part{0, call.shape.row_block(), 0, tile.num_cols, scratch.tile.data(), S::kTileCols};
    S::store(call, worker, task, S::plane_rows(call, task, plane), part);
    const long long store_end = now_ns();
    // A stage that lives in this epilogue gets its share of the time, so that tables show it in every plan.
    const bool is_swiglu = S::kStage == Stage::gate_up && plane == Plane::hidden;
    const bool is_combine = S::kStage == Stage::down && is_combine_in_down(call);
    worker.stats(is_swiglu ? Stage::swiglu : S::kStage).busy_ns += element_end - last;
    worker.stats(is_combine ? Stage::combine : S::kStage).busy_ns += store_end - element_end;
    const int64 rows = task.part == 0 ? tile.num_rows : 0;
    const int64 bytes = int64{tile.num_rows} * tile.num_cols * static_cast<int64>(sizeof(bf16));
    if (is_swiglu) worker.count(Stage::swiglu, Cost{rows, bytes, 0});
    if (is_combine) worker.count(Stage::combine, Cost{rows, bytes, 0});
    last = store_end;
  }
}

}  // namespace mok::host
