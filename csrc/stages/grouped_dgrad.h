// grouped_dgrad: the matrix products of a backward that give gradients of activations.
//
//   down_dgrad             d_h[rows, I] = d_y[rows, H] W_down
//   gate_up_dgrad          d_x[rows, H] = d_gate[rows, I] W_gate + d_up[rows, I] W_up, one sum over 2 I
//   shared_down_dgrad      the shared expert's, on this rank's own tokens
//   shared_gate_up_dgrad
// The contract is that of product.h. B[k, cols] is a weight as it stands, so k runs over its rows. swiglu_backward in
// down_dgrad's epilogue combines the sums with gate, up and the row's weight.
#pragma once

#include "stages/product.h"
#include "stages/reverse_dispatch.h"
#include "stages/swiglu_backward.h"

namespace mok {

template <Stage kStageValue>
struct GroupedDgrad {
  static constexpr Stage kStage = kStageValue;
  static constexpr bool kIsShared = kStage == Stage::shared_down_dgrad || kStage == Stage::shared_gate_up_dgrad;
  static constexpr bool kIsDown = kStage == Stage::down_dgrad || kStage == Stage::shared_down_dgrad;
  static constexpr int kNumAccumulators = 1, kNumProducts = kIsDown ? 1 : 2;
  static constexpr Major kMajorA = Major::k, kMajorB = Major::mn;
  static constexpr bool kHasSums = false, kIsBackward = true;
  static constexpr int kTileCols = kDownCols;
  using Epilogue = GroupedDgrad;

  MOK_DEVICE static int32 tile_rows(const Call& call) { return call.shape.row_block(); }

  MOK_DEVICE static int32 expert_width(const Call& call) {
    return kIsShared ? call.shape.shared_size : call.shape.intermediate_size;
  }
  MOK_DEVICE static int32 width(const Call& call) {  // of the output
    return kIsDown ? expert_width(call) : call.shape.hidden_size;
  }

  MOK_DEVICE static GemmTile decode(const Call& call, const Task& task) {
    GemmTile tile;
    tile.expert = task.expert;
    tile.num_rows = task.num_rows;
    tile.first_col = task.part * kTileCols;
    tile.num_cols = min_of(kTileCols, width(call) - tile.first_col);
    tile.num_k = kNumProducts * (kIsDown ? call.shape.hidden_size : expert_width(call));
    return tile;
  }

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if constexpr (kStage == Stage::down_dgrad) {
      if (is_swiglu_backward_in_down_dgrad(call) && !SwigluBackward::wait_gate_up_replayed(call, task.block, signals))
        return false;
      const Grain grain = signal_grain(Edge::d_y_ready, call, task.block);
      return signals.wait_local(Edge::d_y_ready, grain.index, grain.want);
    }
    if constexpr (kStage == Stage::gate_up_dgrad)
      return signals.wait_local(Edge::d_gate_up_ready, task.block, arrivals(Edge::d_gate_up_ready, call));
    if constexpr (kStage == Stage::shared_gate_up_dgrad)
      return signals.wait_local(Edge::shared_d_gate_up_ready, task.block, arrivals(Edge::shared_d_gate_up_ready, call));
    return true;  // d_output is the caller's own tensor
  }

  MOK_DEVICE static Operands operands(const Call& call, const Task& task, const GemmTile& tile, int32 product) {
    const int64 rows = kIsDown ? call.shape.hidden_size : expert_width(call);  // of a weight
    const Operand weight{weight_of(product), int64{tile.expert} * rows, tile.first_col};
    return Operands{left_operand(call, task, product), {weight, weight}};
  }

  MOK_DEVICE static bool is_swiglu_backward_here(const Call& call) {
    return kIsDown && (kIsShared || is_swiglu_backward_in_down_dgrad(call));
  }
  MOK_DEVICE static PlaneList planes(const Call& call, const Task&) {
    if (!kIsDown) return PlaneList().with(Plane::d_x);
    if (!is_swiglu_backward_here(call)) return PlaneList().with(Plane::d_hidden);
    return PlaneList().with(Plane::weighted_hidden).with(Plane::d_up).with(Plane::d_gate);
  }
  static constexpr int kMaxPlanes = kIsDown ? 4 : 1;
  MOK_DEVICE static Plane plane_at(int32 i) {
    if (!kIsDown) return Plane::d_x;
    return i == 0 ? Plane::d_gate : i == 1 ? Plane::d_up : i == 2 ? Plane::weighted_hidden : Plane::d_hidden;
  }
  MOK_DEVICE static int32 plane_accumulator(Plane plane) {
    return plane == Plane::d_x || plane == Plane::d_hidden ? 0 : -1;
  }
  static constexpr bool kElementReadsRows = kIsDown;

  // swiglu_backward. Leaves the row's part of d_router with the last plane.
  template <class Lanes>
  MOK_DEVICE static void element(const Call& call, const Task& task, Plane plane, int32 row, int32 tile_col,
                                 const float (&acc)[Lanes::kNum], const float (&)[Lanes::kNum], const Lanes& lanes,
                                 bf16 (&out)[Lanes::kNum]) {
    const int32 col = task.part * kTileCols + tile_col;
    const int64 at = (kIsShared ? first_row(call, task) + row : 0) * expert_width(call) + col;
    const bf16* gate = (kIsShared ? call.tensors.context_shared_gate : gate_row(call, task.block, row)) + at;
    const bf16* up = (kIsShared ? call.tensors.context_shared_up : up_row(call, task.block, row)) + at;
    const float weight = kIsShared ? 1.0f : *row_weight(call, task.block, row);
    float router[Lanes::kNum];
    MOK_UNROLL
    for (int32 i = 0; i < Lanes::kNum; ++i) {
      const int32 column = lanes.column(i);
      const SwigluGradient gradient =
          swiglu_backward(call, to_float(gate[column]), to_float(up[column]), acc[i], weight);
      router[i] = gradient.router;
      out[i] = to_bf16(plane == Plane::d_gate ? gradient.d_gate
                       : plane == Plane::d_up ? gradient.d_up
                                              : gradient.weighted_hidden);
    }
    // w * h is quantized later, along the rows.
    if (!kIsShared && plane != Plane::weighted_hidden && call.shape.is_mxfp8()) round_trip(lanes, out);
    if (kIsShared || plane != Plane::weighted_hidden) return;
    const float sum = lanes.sum(router);
    if (lanes.is_first()) router_partials(call, task.block, row)[col / kLaneCols] = sum;
  }
  MOK_DEVICE static Stage element_stage(const Call& call, Plane) {
    return kStage == Stage::down_dgrad && is_swiglu_backward_here(call) ? Stage::swiglu_backward : kStage;
  }
  MOK_DEVICE static Stage store_stage(const Call& call) {
    return kStage == Stage::gate_up_dgrad && is_reverse_dispatch_in_gate_up_dgrad(call) ? Stage::reverse_dispatch
                                                                                        : kStage;
  }

  // Where the block's rows of a plane start; null where each row has a place of its own, at its source.
  MOK_DEVICE static bf16* plane_rows(const Call& call, const Task& task, Plane plane) {
    const Tensors& t = call.tensors;
    if constexpr (kIsShared) {
      const int64 first = first_row(call, task);
      if (plane == Plane::d_x) return call.at<bf16>(Region::shared_y) + first * call.shape.hidden_size;
      bf16* saved = plane == Plane::d_gate ? t.saved_shared_d_gate
                    : plane == Plane::d_up ? t.saved_shared_d_up
                                           : t.saved_shared_hidden;
      const Region region = plane == Plane::d_gate ? Region::shared_d_gate
                            : plane == Plane::d_up ? Region::shared_d_up
                                                   : Region::shared_hidden;
      return (saved ? saved : call.at<bf16>(region)) + first * call.shape.shared_size;
    } else {
      switch (plane) {
        case Plane::d_hidden:
          return d_hidden_row(call, task.block, 0);
        case Plane::d_gate:
          return d_gate_row(call, task.block, 0);
        case Plane::d_up:
          return d_up_row(call, task.block, 0);
        case Plane::weighted_hidden:
          return hidden_row(call, task.block, 0);
        default:
          return is_reverse_dispatch_in_gate_up_dgrad(call) ? nullptr : d_x_row(call, task.block, 0);
      }
    }
  }

  MOK_DEVICE static bf16* row_address(const Call& call, const Task& task, bf16* rows, int32 row) {
    return tile_row(call, task, rows, width(call), row, !kIsShared && rows);
  }

  // As of grouped_gemm.h. Where rows are pushed, the first column tile pushes their d_router too.
  template <class Worker>
  MOK_DEVICE static void store(const Call& call, Worker& worker, const Task& task, bf16* rows, const TilePart& part) {
    const int32 first_col = task.part * kTileCols + part.first_col;
    store_tile_part(call, worker, task, rows, part, width(call), first_col, !kIsShared && rows);
    if (kStage == Stage::gate_up_dgrad && !rows && first_col == 0)
      push_d_router(call, worker, task.block, part.first_row,
                    min_of(part.num_rows, max_of(0, task.num_rows - part.first_row)));
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if constexpr (kStage == Stage::shared_down_dgrad) {
      signals.add(Edge::shared_d_gate_up_ready, task.block);
    } else if constexpr (kStage == Stage::shared_gate_up_dgrad) {
      signals.add(Edge::shared_ready, task.block);
    } else if constexpr (kStage == Stage::down_dgrad) {
      if (is_swiglu_backward_in_down_dgrad(call))
        SwigluBackward::say_d_gate_up_ready(call, task.block, signals);
      else
        signals.add(Edge::d_hidden_ready, task.block);
    } else if (is_reverse_dispatch_in_gate_up_dgrad(call)) {
      free_slot(call, task.block, signals);
    } else {
      signals.add(Edge::d_x_ready, signal_grain(Edge::d_x_ready, call, task.block).index);
    }
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const GemmTile tile = decode(call, task);
    const int64 rows = tile.num_rows, cols = tile.num_cols, k = tile.num_k;
    return Cost{task.part == 0 ? rows : 0, (rows * k + cols * k + rows * cols) * int64{sizeof(bf16)},
                2 * rows * cols * k};
  }

 private:
  MOK_DEVICE static Operand left_operand(const Call& call, const Task& task, int32 product) {
    const Tensors& t = call.tensors;
    if constexpr (kStage == Stage::down_dgrad)
      return ring_operand(call, Matrix::ring_d_y, Matrix::saved_d_y, t.saved_d_y, task.block);
    else if constexpr (kStage == Stage::shared_down_dgrad)
      return Operand{Matrix::d_output, first_row(call, task), 0};
    else if constexpr (kStage == Stage::gate_up_dgrad)
      return product == 0 ? ring_operand(call, Matrix::ring_d_gate, Matrix::saved_d_gate, t.saved_d_gate, task.block)
                          : ring_operand(call, Matrix::ring_d_up, Matrix::saved_d_up, t.saved_d_up, task.block);
    else
      return Operand{product == 0 ? Matrix::shared_d_gate : Matrix::shared_d_up, first_row(call, task), 0};
  }
  MOK_DEVICE static Matrix weight_of(int32 product) {
    if (kIsDown) return kIsShared ? Matrix::w_shared_down : Matrix::w_routed_down;
    if (kIsShared) return product == 0 ? Matrix::w_shared_gate : Matrix::w_shared_up;
    return product == 0 ? Matrix::w_dgrad_gate : Matrix::w_dgrad_up;
  }
  MOK_DEVICE static int64 first_row(const Call& call, const Task& task) {
    return int64{task.block} * call.shape.row_block();
  }
};

using DownDgrad = GroupedDgrad<Stage::down_dgrad>;
using GateUpDgrad = GroupedDgrad<Stage::gate_up_dgrad>;
using SharedDownDgrad = GroupedDgrad<Stage::shared_down_dgrad>;
using SharedGateUpDgrad = GroupedDgrad<Stage::shared_gate_up_dgrad>;

}  // namespace mok
