// wgrad: gradients of the weights, sums over an expert's rows in ascending order.
//
//   d_gate_weight[I, H] = d_gate^T x     d_up_weight[I, H] = d_up^T x     d_down_weight[H, I] = d_y^T (w h)
// Both operands stand with their rows as k. A task is a tile of one of the three. An expert that goes on in the next
// macrobatch leaves its FP32 tile in the carry, where the same tile of that macrobatch starts from; so the sums do not
// depend on where macrobatches end. One scratch serves all boundaries: whoever writes a carry waits until the same tile
// of the expert that came into this macrobatch has read the one before.
// shared_wgrad: the same for the shared expert, over this rank's own tokens.
#pragma once

#include "stages/gradient_operands.h"

namespace mok {

// One tile: rows and columns of the weight, and the two operands' first elements.
struct WgradTile {
  enum Weight : int32 { gate, up, down } weight;
  int32 first_row, num_rows;
  int32 first_col, num_cols;
  int64 pitch;    // of the weight
  const bf16* a;  // [k, a_pitch]: columns are rows of the weight
  int64 a_pitch;
  const bf16* b;  // [k, b_pitch]: columns are columns of the weight
  int64 b_pitch;
};

template <bool kIsShared>
struct WgradOf {
  static constexpr Stage kStage = kIsShared ? Stage::shared_wgrad : Stage::wgrad;

  MOK_DEVICE static int64 expert_width(const Call& call) {
    return kIsShared ? call.shape.shared_size : call.shape.intermediate_size;
  }

  MOK_DEVICE static WgradTile decode(const Call& call, const Task& task) {
    const int32 inner = static_cast<int32>(expert_width(call)), hidden = call.shape.hidden_size;
    const int32 per_gate = ceil_div(inner, kWgradRows) * ceil_div(hidden, kWgradCols);
    WgradTile tile;
    tile.weight = task.part < per_gate ? WgradTile::gate : task.part < 2 * per_gate ? WgradTile::up : WgradTile::down;
    const int32 index = task.part - static_cast<int32>(tile.weight) * per_gate;
    const int32 height = tile.weight == WgradTile::down ? hidden : inner;
    const int32 width = tile.weight == WgradTile::down ? inner : hidden;
    const int32 across = ceil_div(width, kWgradCols);
    tile.first_row = index / across * kWgradRows;
    tile.num_rows = min_of(kWgradRows, height - tile.first_row);
    tile.first_col = index % across * kWgradCols;
    tile.num_cols = min_of(kWgradCols, width - tile.first_col);
    tile.pitch = width;
    tile.a_pitch = height;
    tile.b_pitch = width;
    tile.a = operand(call, task,
                     tile.weight == WgradTile::gate ? Operand::d_gate
                     : tile.weight == WgradTile::up ? Operand::d_up
                                                    : Operand::d_y) +
             tile.first_row;
    tile.b = operand(call, task, tile.weight == WgradTile::down ? Operand::hidden : Operand::x) + tile.first_col;
    return tile;
  }

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return needs_of_other_kernels(args, task, signals) && needs_carry_place(args, task, signals);
  }
  // The rows, and the carry that the sums start from.
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

  // The first unit of the carry that a tile has; the others follow. Its number tells the tile's signals from others'.
  MOK_DEVICE static int32 carry_unit(const Call& call, const Task& task) {
    const WgradTile tile = decode(call, task);
    const int32 inner = static_cast<int32>(expert_width(call)), hidden = call.shape.hidden_size;
    const int32 per_gate = ceil_div(inner, kCarryRows) * ceil_div(hidden, kCarryCols);
    const int32 across = ceil_div(tile.weight == WgradTile::down ? inner : hidden, kCarryCols);
    return static_cast<int32>(tile.weight) * per_gate + tile.first_row / kCarryRows * across +
           tile.first_col / kCarryCols;
  }
  // Where an element of the tile is in its carry.
  MOK_DEVICE static int32 carry_offset(int32 row, int32 col) {
    return col / kCarryCols * (kCarryRows * kCarryCols) + row * kCarryCols + col % kCarryCols;
  }
  // The FP32 sums that the tile starts from, at carry_offset; null: from zero.
  MOK_DEVICE static const float* carry_in(const Call& call, const Task& task) {
    return is_carried_in(call, task) ? carry_tile(call, task) : nullptr;
  }
  // Where the sums go instead of the gradient; null: they are complete.
  MOK_DEVICE static float* carry_out(const Call& call, const Task& task) {
    return is_carried_out(call, task) ? carry_tile(call, task) : nullptr;
  }

  // 32 columns of a row of the weight, held by the calling lanes: rounded into the caller's tensor, or added to it.
  template <class Lanes>
  MOK_DEVICE static void element(const Call& call, const Task& task, const WgradTile& tile, int32 row, int32 col,
                                 const float (&acc)[Lanes::kNum], const Lanes& lanes) {
    const WeightGradients& d = call.tensors.d_weights;
    const bool is_fresh = d.mode == GradientMode::store;
    if (task.num_rows == 0 && !is_fresh) return;  // untouched, to the sign of a zero
    const int64 at = (int64{task.expert} * (tile.weight == WgradTile::down ? tile.a_pitch : expert_width(call)) +
                      tile.first_row + row) *
                         tile.pitch +
                     tile.first_col + col;
    void* weight = tile.weight == WgradTile::gate ? (kIsShared ? d.shared_gate : d.routed_gate)
                   : tile.weight == WgradTile::up ? (kIsShared ? d.shared_up : d.routed_up)
                                                  : (kIsShared ? d.shared_down : d.routed_down);
    MOK_UNROLL
    for (int32 i = 0; i < Lanes::kNum; ++i) {
      const int64 element = at + lanes.column(i);
      if (d.mode == GradientMode::add_fp32) {
        static_cast<float*>(weight)[element] += acc[i];
      } else {
        bf16* cell = static_cast<bf16*>(weight) + element;
        *cell = to_bf16(is_fresh ? acc[i] : to_float(*cell) + acc[i]);
      }
    }
  }

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
    const WgradTile tile = decode(call, task);
    const int64 rows = tile.num_rows, cols = tile.num_cols, k = task.num_rows;
    return Cost{task.part == 0 ? k : 0, (rows * k + cols * k + rows * cols) * int64{sizeof(bf16)}, 2 * rows * cols * k};
  }

 private:
  using Operand = GradientOperand;

  MOK_DEVICE static const bf16* operand(const Call& call, const Task& task, Operand operand) {
    const Tensors& t = call.tensors;
    if constexpr (kIsShared) {
      switch (operand) {
        case Operand::x:
          return t.x;
        case Operand::d_gate:
          return t.saved_shared_d_gate ? t.saved_shared_d_gate : call.at<bf16>(Region::shared_d_gate);
        case Operand::d_up:
          return t.saved_shared_d_up ? t.saved_shared_d_up : call.at<bf16>(Region::shared_d_up);
        case Operand::hidden:
          return t.saved_shared_hidden ? t.saved_shared_hidden : call.at<bf16>(Region::shared_hidden);
        default:
          return t.d_output;
      }
    } else {
      return call.shape.is_mxfp8() ? columnwise_row(call, operand, task.block, 0)
                                   : operand_row(call, operand, task.block, 0);
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
