// grouped_gemm: the matrix products of a forward: gate_up, down and the shared expert's two.
#pragma once

#include "stages/product.h"
#include "stages/swiglu.h"
#include "stages/token_rows.h"

namespace mok {

template <Stage kStageValue>
struct GroupedGemm {
  static constexpr Stage kStage = kStageValue;
  static constexpr bool kIsShared = kStage == Stage::shared_gate_up || kStage == Stage::shared_down;
  static constexpr bool kIsGateUp = kStage == Stage::gate_up || kStage == Stage::shared_gate_up;
  static constexpr int kNumAccumulators = kIsGateUp ? 2 : 1, kNumProducts = 1;
  static constexpr Major kMajorA = Major::k, kMajorB = Major::k;
  static constexpr bool kHasSums = false, kIsBackward = false;
  static constexpr int kTileCols = kIsGateUp ? kGateUpCols : kDownCols;

  using Epilogue = GroupedGemm<kIsGateUp ? Stage::gate_up : Stage::down>;

  MOK_DEVICE static int32 tile_rows(const Call& call) { return call.shape.row_block(); }
  MOK_DEVICE static int32 width(const Call& call) {  // of the output
    const Shape& s = call.shape;
    return kIsGateUp ? (kIsShared ? s.shared_size : s.intermediate_size) : s.hidden_size;
  }

  MOK_DEVICE static GemmTile decode(const Call& call, const Task& task) {
    const Shape& s = call.shape;
    GemmTile tile;
    tile.expert = task.expert;
    tile.num_rows = task.num_rows;
    tile.first_col = task.part * kTileCols;
    tile.num_cols = min_of(kTileCols, width(call) - tile.first_col);
    tile.num_k = kIsGateUp ? s.hidden_size : kIsShared ? s.shared_size : s.intermediate_size;
    return tile;
  }

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if constexpr (kStage == Stage::gate_up) return wait_x_ready(call, task.block, signals);
    if constexpr (kStage == Stage::down)
      return signals.wait_local(Edge::hidden_ready, task.block, arrivals(Edge::hidden_ready, call));
    if constexpr (kStage == Stage::shared_down)
      return signals.wait_local(Edge::shared_hidden_ready, task.block, arrivals(Edge::shared_hidden_ready, call));
    return true;  // the shared expert's input is the caller's own tensor
  }

  MOK_DEVICE static Operands operands(const Call& call, const Task& task, const GemmTile& tile, int32 /*product*/ = 0) {
    const int64 b_row = int64{tile.expert} * width(call) + tile.first_col;
    const int64 a_row = kIsShared ? int64{task.block} * call.shape.row_block() : 0;
    if constexpr (kStage == Stage::gate_up)
      return Operands{ring_operand(call, Matrix::ring_x, Matrix::context_x, kept_x(call), task.block),
                      {{Matrix::w_routed_gate, b_row, 0}, {Matrix::w_routed_up, b_row, 0}}};
    else if constexpr (kStage == Stage::down)
      return Operands{ring_operand(call, Matrix::ring_hidden, Matrix::ring_hidden, false, task.block),
                      {{Matrix::w_routed_down, b_row, 0}, {Matrix::w_routed_down, b_row, 0}}};
    else if constexpr (kStage == Stage::shared_gate_up)
      return Operands{{Matrix::x, a_row, 0}, {{Matrix::w_shared_gate, b_row, 0}, {Matrix::w_shared_up, b_row, 0}}};
    else
      return Operands{{Matrix::shared_hidden, a_row, 0},
                      {{Matrix::w_shared_down, b_row, 0}, {Matrix::w_shared_down, b_row, 0}}};
  }

  // gate_up leaves gate and up where they are kept or where swiglu is a kernel of its own, and h where it is not.
  MOK_DEVICE static PlaneList planes(const Call& call, const Task& task) {
    if constexpr (!kIsGateUp) {
      return PlaneList().with(Plane::y);
    } else {
      // A recomputation and a replay want gate and up only.
      const bool is_swiglu_here = call.kind == CallKind::forward && (kIsShared || is_swiglu_in_gate_up(call));
      const bool is_kept = kIsShared ? call.tensors.context_shared_gate != nullptr
                                     : call.tensors.context_gate && block_macrobatch(call.shape, task.block) == 0;
      PlaneList list;
      if (is_kept || !is_swiglu_here) list = list.with(Plane::gate).with(Plane::up);
      return is_swiglu_here ? list.with(Plane::hidden) : list;
    }
  }

  // The planes that `planes` chooses from, for targets that store them in a fixed order.
  static constexpr int kMaxPlanes = kIsGateUp ? 3 : 1;
  MOK_DEVICE static Plane plane_at(int32 i) {
    return !kIsGateUp ? Plane::y : i == 0 ? Plane::hidden : i == 1 ? Plane::gate : Plane::up;
  }
  MOK_DEVICE static int32 plane_accumulator(Plane plane) {
    return plane == Plane::hidden ? -1 : plane == Plane::up ? 1 : 0;
  }
  static constexpr bool kElementReadsRows = false;  // `element` looks at nothing but the accumulators

  // Columns [col, col + 32) of row `row` of the tile: the calling lanes hold them, this one Lanes::kNum of them.
  template <class Lanes>
  MOK_DEVICE static void element(const Call& call, const Task& task, Plane, int32 /*row*/, int32 /*col*/,
                                 const float (&acc0)[Lanes::kNum], const float (&acc1)[Lanes::kNum], const Lanes& lanes,
                                 bf16 (&out)[Lanes::kNum]) {
    MOK_UNROLL
    for (int32 i = 0; i < Lanes::kNum; ++i) out[i] = swiglu(call, acc0[i], acc1[i]);
    if (call.shape.is_mxfp8() && task.stage == Stage::gate_up) round_trip(lanes, out);  // the shared expert is BF16
  }
  MOK_DEVICE static Stage element_stage(const Call&, Plane plane) {
    return kStage == Stage::gate_up && plane == Plane::hidden ? Stage::swiglu : kStage;
  }
  MOK_DEVICE static Stage store_stage(const Call& call) {
    return kStage == Stage::down && is_combine_in_down(call) ? Stage::combine : kStage;
  }

  // Where the rows of a task's block start in a plane; null where each row has a place of its own, at its source.
  MOK_DEVICE static bf16* plane_rows(const Call& call, const Task& task, Plane plane) {
    if constexpr (kStage == Stage::down)
      if (is_combine_in_down(call)) return nullptr;
    return plane_block(call, task, plane);
  }

  // Where row `row` of the block goes, given plane_rows; null: nowhere.
  MOK_DEVICE static bf16* row_address(const Call& call, const Task& task, bf16* rows, int32 row) {
    return tile_row(call, task, rows, width(call), row, !kIsShared && rows);
  }

  // Stores a part of a plane's tile to `rows` (of plane_rows).
  template <class Worker>
  MOK_DEVICE static void store(const Call& call, Worker& worker, const Task& task, bf16* rows, const TilePart& part) {
    store_tile_part(call, worker, task, rows, part, width(call), task.part * kTileCols + part.first_col,
                    !kIsShared && rows);
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if constexpr (kStage == Stage::gate_up) {
      const bool is_hidden = call.kind == CallKind::forward && is_swiglu_in_gate_up(call);
      signals.add(is_hidden ? Edge::hidden_ready : Edge::gate_up_ready, task.block);
    } else if constexpr (kStage == Stage::shared_gate_up) {
      signals.add(Edge::shared_hidden_ready, task.block);
    } else if constexpr (kStage == Stage::shared_down) {
      signals.add(Edge::shared_ready, task.block);
    } else if (is_combine_in_down(call)) {
      free_slot(call, task.block, signals);
    } else {
      const Grain grain = signal_grain(Edge::y_ready, call, task.block);
      if (!call.shape.is_pull_combine) {
        signals.add(Edge::y_ready, grain.index);
      } else if (signals.arrive(Edge::y_ready, grain.index, grain.want)) {
        for (int32 dst = 0; dst < call.shape.num_ranks; ++dst) signals.set_arrival(Edge::y_arrived, grain.index, dst);
      }
    }
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const GemmTile tile = decode(call, task);
    const int64 rows = tile.num_rows, cols = tile.num_cols, k = tile.num_k;
    // Rows are counted once a block, not once a column tile.
    const int64 elements = rows * k + kNumAccumulators * cols * k + rows * cols;
    return Cost{task.part == 0 ? rows : 0, elements * int64{sizeof(bf16)}, 2 * kNumAccumulators * rows * cols * k};
  }

 private:
  // Row 0 of a task's block in a plane.
  MOK_DEVICE static bf16* plane_block(const Call& call, const Task& task, Plane plane) {
    const Tensors& t = call.tensors;
    if constexpr (kIsShared) {
      bf16* base = plane == Plane::y      ? call.at<bf16>(Region::shared_y)
                   : plane == Plane::gate ? t.context_shared_gate
                   : plane == Plane::up   ? t.context_shared_up
                                          : call.at<bf16>(Region::shared_hidden);
      return base + int64{task.block} * call.shape.row_block() * width(call);
    } else {
      if (plane == Plane::gate) return gate_row(call, task.block, 0);
      if (plane == Plane::up) return up_row(call, task.block, 0);
      if (plane == Plane::hidden) return hidden_row(call, task.block, 0);
      return y_row(call, task.block, 0);
    }
  }
};

using GateUp = GroupedGemm<Stage::gate_up>;
using Down = GroupedGemm<Stage::down>;
using SharedGateUp = GroupedGemm<Stage::shared_gate_up>;
using SharedDown = GroupedGemm<Stage::shared_down>;

}  // namespace mok
