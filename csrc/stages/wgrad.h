// wgrad: gradients of the weights, sums over an expert's rows in ascending order.
//
//   d_gate_weight[I, H] = d_gate^T x     d_up_weight[I, H] = d_up^T x     d_down_weight[H, I] = d_y^T (w h)
// The contract is that of product.h; rows of both operands are k. A task is a tile of one of the three. An expert that goes
// on in the next macrobatch leaves its FP32 tile in the carry, where the same tile of that macrobatch starts from; so the sums do not
// depend on where macrobatches end. One scratch serves all boundaries: whoever writes a carry waits until the same tile
// of the expert that came into this macrobatch has read the one before.
// shared_wgrad: the same for the shared expert, over this rank's own tokens.
#pragma once

#include "stages/gradient_operands.h"
#include "stages/product.h"

namespace mok {

template <bool kIsShared>
struct WgradOf {
  static constexpr Stage kStage = kIsShared ? Stage::shared_wgrad : Stage::wgrad;
  static constexpr int kNumAccumulators = 1, kNumProducts = 1;
  static constexpr Major kMajorA = Major::mn, kMajorB = Major::mn;
  static constexpr bool kHasSums = true, kIsBackward = true;
  static constexpr int kTileCols = kWgradCols;
  MOK_DEVICE static int32 tile_rows(const Call&) { return kWgradRows; }

  MOK_DEVICE static int64 expert_width(const Call& call) {
    return kIsShared ? call.shape.shared_size : call.shape.intermediate_size;
  }

  MOK_DEVICE static GemmTile decode(const Call& call, const Task& task) {
    const Place place = place_of(call, task);
    return GemmTile{task.expert, min_of(kWgradRows, place.height - place.first_row), place.first_col,
                    min_of(kWgradCols, place.width - place.first_col), task.num_rows};
  }

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return needs_of_other_kernels(args, task, signals) && needs_carry_place(args, task, signals);
  }
  // The rows, and the carry that the sums start from. (A function in this one's place keeps its carries itself.)
  template <class Worker>
  MOK_DEVICE static bool needs_of_other_kernels(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if (task.num_rows == 0) return true;
    if constexpr (kIsShared) {
      if (!call.has_dgrad()) return true;
      const Word want = arrivals(Edge::shared_d_gate_up_ready, call);
      for (int32 block = 0; block < ceil_div(task.num_rows, call.shape.row_block()); ++block)
        if (!signals.wait_local(Edge::shared_d_gate_up_ready, block, want)) return false;
      return true;
    } else {
      if (!call.has_dgrad() && !call.shape.is_mxfp8()) return true;
      const int32 macrobatch = block_macrobatch(call.shape, task.block);
      const BlockRange blocks = expert_blocks(call, task.expert, macrobatch);
      const Word want = static_cast<Word>(blocks.end - blocks.first) * arrivals(Edge::segment_ready, call);
      if (!signals.wait_local(Edge::segment_ready, segment_index(call, task.expert, macrobatch), want)) return false;
      return !is_carried_in(call, task) ||
             signals.wait_local(Edge::carry_done, carry_index(call, carry_unit(call, task), macrobatch - 1),
                                carries_of(call, macrobatch - 1));
    }
  }
  // The carry that this tile leaves takes the place of the one that came into this macrobatch.
  template <class Worker>
  MOK_DEVICE static bool needs_carry_place(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if (kIsShared || task.num_rows == 0 || (!call.has_dgrad() && !call.shape.is_mxfp8())) return true;
    const int32 macrobatch = block_macrobatch(call.shape, task.block);
    if (is_carried_in(call, task) || !is_carried_out(call, task) || !has_carry_in(call, macrobatch)) return true;
    return signals.wait_local(Edge::carry_done, carry_index(call, carry_unit(call, task), macrobatch), 1);
  }

  MOK_DEVICE static Operands operands(const Call& call, const Task& task, const GemmTile&, int32 /*product*/) {
    const Place place = place_of(call, task);
    Operand a = operand(call, task,
                        place.weight == gate ? GradientOperand::d_gate
                        : place.weight == up ? GradientOperand::d_up
                                             : GradientOperand::d_y);
    Operand b = operand(call, task, place.weight == down ? GradientOperand::hidden : GradientOperand::x);
    a.col = place.first_row;
    b.col = place.first_col;
    return Operands{a, {b, b}};
  }
  MOK_DEVICE static const float* start(const Call& call, const Task& task) {
    return is_carried_in(call, task) ? carry_tile(call, task) : nullptr;
  }
  // A tile's carry is the units that it touches, side by side: [kCarryRows, pitch].
  MOK_DEVICE static int32 start_pitch(const GemmTile& tile) { return ceil_div(tile.num_cols, kCarryCols) * kCarryCols; }
  // The first of these units. Its number also tells the tile's signals from those of others.
  MOK_DEVICE static int32 carry_unit(const Call& call, const Task& task) {
    const Place place = place_of(call, task);
    const int32 inner = static_cast<int32>(expert_width(call)), hidden = call.shape.hidden_size;
    const int32 per_gate = ceil_div(inner, kCarryRows) * ceil_div(hidden, kCarryCols);
    return static_cast<int32>(place.weight) * per_gate +
           place.first_row / kCarryRows * ceil_div(place.width, kCarryCols) + place.first_col / kCarryCols;
  }

  // The gradient, or the carry where the sums are not complete. Of an expert without rows: zeros, or nothing where they
  // would be added (that would change the sign of a zero).
  MOK_DEVICE static PlaneList planes(const Call& call, const Task& task) {
    if (is_carried_out(call, task)) return PlaneList().with(Plane::carry);
    if (task.num_rows == 0 && call.tensors.d_weights.mode != GradientMode::store) return PlaneList();
    return PlaneList().with(Plane::weight);
  }

  // Columns [col, col + 32) of row `row` of the tile: into the carry as they are; rounded into the caller's tensor, or
  // added to it.
  template <class Lanes>
  MOK_DEVICE static void store_sums(const Call& call, const Task& task, Plane plane, int32 row, int32 col,
                                    const float (&acc)[Lanes::kNum], const Lanes& lanes) {
    if (plane == Plane::carry) {
      float* cells = carry_tile(call, task) + row * start_pitch(decode(call, task)) + col;
      MOK_UNROLL
      for (int32 i = 0; i < Lanes::kNum; ++i) cells[lanes.column(i)] = acc[i];
      return;
    }
    const WeightGradients& d = call.tensors.d_weights;
    const Place place = place_of(call, task);
    const int64 at = (int64{task.expert} * place.height + place.first_row + row) * place.width + place.first_col + col;
    void* weight = place.weight == gate ? (kIsShared ? d.shared_gate : d.routed_gate)
                   : place.weight == up ? (kIsShared ? d.shared_up : d.routed_up)
                                        : (kIsShared ? d.shared_down : d.routed_down);
    MOK_UNROLL
    for (int32 i = 0; i < Lanes::kNum; ++i) {
      const int64 element = at + lanes.column(i);
      if (d.mode == GradientMode::add_fp32) {
        static_cast<float*>(weight)[element] += acc[i];
      } else {
        bf16* cell = static_cast<bf16*>(weight) + element;
        *cell = to_bf16(d.mode == GradientMode::store ? acc[i] : to_float(*cell) + acc[i]);
      }
    }
  }
  MOK_DEVICE static Stage element_stage(const Call&, Plane) { return kStage; }
  MOK_DEVICE static Stage store_stage(const Call&) { return kStage; }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    if constexpr (!kIsShared) {
      const Call& call = args.call;
      const Shape& s = call.shape;
      if (task.num_rows == 0 || !call.can_replay()) return;
      const int32 macrobatch = block_macrobatch(s, task.block);
      const BlockRange blocks = expert_blocks(call, task.expert, macrobatch);
      // The carry has been read, or left, or both.
      if (is_carried_in(call, task) || is_carried_out(call, task))
        signals.add(Edge::carry_done, carry_index(call, carry_unit(call, task), macrobatch));
      for (int32 slot = block_slot(s, blocks.first); slot <= block_slot(s, blocks.end - 1); ++slot)
        signals.add(Edge::slot_free, slot_index(s, macrobatch, slot));
    }
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const GemmTile tile = decode(call, task);
    const int64 rows = tile.num_rows, cols = tile.num_cols, k = task.num_rows;
    return Cost{task.part == 0 ? k : 0, (rows * k + cols * k + rows * cols) * int64{sizeof(bf16)}, 2 * rows * cols * k};
  }

 private:
  enum Weight : int32 { gate, up, down };
  // Of a tile in its weight [height, width].
  struct Place {
    Weight weight;
    int32 height, width, first_row, first_col;
  };
  MOK_DEVICE static Place place_of(const Call& call, const Task& task) {
    const int32 inner = static_cast<int32>(expert_width(call)), hidden = call.shape.hidden_size;
    const int32 per_gate = ceil_div(inner, kWgradRows) * ceil_div(hidden, kWgradCols);
    Place place;
    place.weight = task.part < per_gate ? gate : task.part < 2 * per_gate ? up : down;
    place.height = place.weight == down ? hidden : inner;
    place.width = place.weight == down ? inner : hidden;
    const int32 index = task.part - static_cast<int32>(place.weight) * per_gate;
    const int32 across = ceil_div(place.width, kWgradCols);
    place.first_row = index / across * kWgradRows;
    place.first_col = index % across * kWgradCols;
    return place;
  }

  // From the first of the task's rows on.
  MOK_DEVICE static Operand operand(const Call& call, const Task& task, GradientOperand operand) {
    if constexpr (kIsShared) {
      const Matrix matrix = operand == GradientOperand::x        ? Matrix::x
                            : operand == GradientOperand::d_gate ? Matrix::shared_d_gate
                            : operand == GradientOperand::d_up   ? Matrix::shared_d_up
                            : operand == GradientOperand::hidden ? Matrix::shared_hidden
                                                                 : Matrix::d_output;
      return Operand{matrix, 0, 0};
    } else {
      // In MXFP8 what quantize leaves, where columnwise_row says: always in the ring.
      const Tensors& t = call.tensors;
      const bool is_mxfp8 = call.shape.is_mxfp8();
      switch (operand) {
        case GradientOperand::x:
          return ring_operand(call, Matrix::ring_x, Matrix::context_x, !is_mxfp8 && kept_x(call), task.block);
        case GradientOperand::d_gate:
          return ring_operand(call, is_mxfp8 ? Matrix::ring_gate : Matrix::ring_d_gate, Matrix::saved_d_gate,
                              !is_mxfp8 && t.saved_d_gate, task.block);
        case GradientOperand::d_up:
          return ring_operand(call, is_mxfp8 ? Matrix::ring_up : Matrix::ring_d_up, Matrix::saved_d_up,
                              !is_mxfp8 && t.saved_d_up, task.block);
        case GradientOperand::hidden:
          return ring_operand(call, Matrix::ring_hidden, Matrix::saved_hidden, !is_mxfp8 && t.saved_hidden, task.block);
        default:
          return ring_operand(call, Matrix::ring_d_y, Matrix::saved_d_y, !is_mxfp8 && t.saved_d_y, task.block);
      }
    }
  }

  MOK_DEVICE static int32 first_block_of(const Call& call, int32 macrobatch) {
    return macrobatch * (call.shape.ring_rows / call.shape.row_block());
  }
  // A segment goes on across the start of a macrobatch.
  MOK_DEVICE static bool has_carry_in(const Call& call, int32 macrobatch) {
    if (macrobatch == 0) return false;
    const int32* expert = call.schedule.row_block_expert + first_block_of(call, macrobatch);
    return expert[-1] == expert[0];
  }
  MOK_DEVICE static bool is_carried_in(const Call& call, const Task& task) {
    if (kIsShared || task.num_rows == 0) return false;
    const int32 macrobatch = block_macrobatch(call.shape, task.block);
    return task.block == first_block_of(call, macrobatch) && has_carry_in(call, macrobatch);
  }
  // Arrivals on a carry_done of a macrobatch that leaves a carry: of the expert that came in with one, and of the one that
  // leaves it, which may be the same.
  MOK_DEVICE static Word carries_of(const Call& call, int32 macrobatch) {
    const int32* expert = call.schedule.row_block_expert;
    const int32 first = first_block_of(call, macrobatch), last = first_block_of(call, macrobatch + 1) - 1;
    return has_carry_in(call, macrobatch) && expert[first] != expert[last] ? 2 : 1;
  }
  MOK_DEVICE static bool is_carried_out(const Call& call, const Task& task) {
    if (kIsShared || task.num_rows == 0) return false;
    const int32 next = first_block_of(call, block_macrobatch(call.shape, task.block) + 1);
    return call.schedule.segment_start[task.expert + 1] / call.shape.row_block() > next;
  }
  MOK_DEVICE static float* carry_tile(const Call& call, const Task& task) {
    return call.at<float>(Region::carry) + int64{carry_unit(call, task)} * kCarryRows * kCarryCols;
  }
};

using Wgrad = WgradOf<false>;
using SharedWgrad = WgradOf<true>;

}  // namespace mok
