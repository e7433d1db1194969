// How many arrivals complete a signal: one function, used by writers and readers alike.
#pragma once

#include "protocol/ring.h"

namespace mok {

MOK_DEVICE int32 num_gate_up_tiles(const Shape& s) { return ceil_div(s.intermediate_size, kGateUpCols); }
MOK_DEVICE int32 num_down_tiles(const Shape& s) { return ceil_div(s.hidden_size, kDownCols); }
MOK_DEVICE int32 num_shared_gate_up_tiles(const Shape& s) { return ceil_div(s.shared_size, kGateUpCols); }
MOK_DEVICE int32 num_publish_tasks(const Call& call) {
  return call.is_input_in_place() ? 1 : max_of(1, ceil_div(call.num_tokens, kPublishRows));
}
MOK_DEVICE int32 num_copy_tasks(const Shape& s) { return s.row_block() / kCopyRows; }
MOK_DEVICE int32 num_down_dgrad_tiles(const Shape& s) { return ceil_div(s.intermediate_size, kDownCols); }
MOK_DEVICE int32 num_shared_down_dgrad_tiles(const Shape& s) { return ceil_div(s.shared_size, kDownCols); }

// down pushes its rows itself: no y in the ring, no combine task.
MOK_DEVICE bool is_combine_in_down(const Call& call) {
  return call.share_kernel(Stage::down, Stage::combine) && !call.shape.is_pull_combine;
}
MOK_DEVICE bool is_swiglu_in_gate_up(const Call& call) { return call.share_kernel(Stage::gate_up, Stage::swiglu); }
// The same two in a backward: swiglu_backward in down_dgrad's epilogue, reverse_dispatch in gate_up_dgrad's stores.
MOK_DEVICE bool is_swiglu_backward_in_down_dgrad(const Call& call) {
  return call.share_kernel(Stage::down_dgrad, Stage::swiglu_backward);
}
MOK_DEVICE bool is_reverse_dispatch_in_gate_up_dgrad(const Call& call) {
  return call.share_kernel(Stage::gate_up_dgrad, Stage::reverse_dispatch);
}

MOK_DEVICE int32 num_swiglu_backward_tasks(const Call& call) {
  return is_swiglu_backward_in_down_dgrad(call) ? num_down_dgrad_tiles(call.shape)
                                                : call.shape.row_block() / kElementRows;
}

// Arrivals of one row block on an edge inside a rank.
MOK_DEVICE int32 arrivals(Edge edge, const Call& call) {
  const Shape& s = call.shape;
  switch (edge) {
    case Edge::x_ready:
      return num_copy_tasks(s);
    case Edge::gate_up_ready:
      return num_gate_up_tiles(s);
    case Edge::hidden_ready:
      return is_swiglu_in_gate_up(call) ? num_gate_up_tiles(s) : s.row_block() / kElementRows;
    case Edge::y_ready:
      return num_down_tiles(s);
    case Edge::slot_free:  // of a backward: without those of the weight gradients, see slot_frees
      if (call.is_backward()) return is_reverse_dispatch_in_gate_up_dgrad(call) ? num_down_tiles(s) : num_copy_tasks(s);
      return is_combine_in_down(call) ? num_down_tiles(s) : num_copy_tasks(s);
    case Edge::d_y_ready:
      return num_copy_tasks(s);
    case Edge::d_hidden_ready:
      return num_down_dgrad_tiles(s);
    case Edge::d_gate_up_ready:
      return num_swiglu_backward_tasks(call);
    case Edge::segment_ready:  // of each of a segment's row blocks
      return s.is_mxfp8() ? s.row_block() / kElementRows : num_swiglu_backward_tasks(call);
    case Edge::d_x_ready:
      return num_down_tiles(s);
    case Edge::shared_d_gate_up_ready:
      return num_shared_down_dgrad_tiles(s);
    case Edge::shared_hidden_ready:
      return num_shared_gate_up_tiles(s);
    case Edge::shared_ready:
      return num_down_tiles(s);
    default:
      return 0;
  }
}

// Row blocks [first, end) of a local expert in a macrobatch; none where first >= end.
struct BlockRange {
  int32 first, end;
};
MOK_DEVICE BlockRange expert_blocks(const Call& call, int32 expert, int32 macrobatch) {
  const int32 row_block = call.shape.row_block(), ring_blocks = call.shape.ring_rows / row_block;
  const int32* start = call.schedule.segment_start + expert;
  return BlockRange{max_of(start[0] / row_block, macrobatch * ring_blocks),
                    min_of(start[1] / row_block, (macrobatch + 1) * ring_blocks)};
}

MOK_DEVICE int64 segment_index(const Call& call, int32 expert, int32 macrobatch) {
  return int64{macrobatch} * call.shape.num_local_experts + expert;
}
MOK_DEVICE int64 carry_index(const Call& call, int32 tile, int32 macrobatch) {
  return int64{macrobatch} * num_carry_tiles(call.shape) + tile;
}

// All arrivals that free a slot of a macrobatch: of its row blocks, and in a backward of the weight gradients of every
// expert that touches it.
MOK_DEVICE Word slot_frees(const Call& call, int32 macrobatch, int32 slot) {
  const Shape& s = call.shape;
  const int32 num_blocks = slot_num_blocks(call, macrobatch, slot);
  const Word frees = static_cast<Word>(num_blocks) * static_cast<Word>(arrivals(Edge::slot_free, call));
  if (!call.is_backward() || num_blocks == 0) return frees;
  const int32* expert =
      call.schedule.row_block_expert + (int64{macrobatch} * s.ring_rows + int64{slot} * s.minibatch) / s.row_block();
  Word num_experts = 1;
  for (int32 block = 1; block < num_blocks; ++block) num_experts += expert[block] != expert[block - 1];
  return frees + num_experts * static_cast<Word>(num_wgrad_tiles(s, s.intermediate_size));
}

// Where a row block's x_ready, y_ready, d_y_ready or d_x_ready stands, and what makes it complete: per row block, or per
// minibatch slot (an ablation).
struct Grain {
  int64 index;
  Word want;
};
MOK_DEVICE Grain signal_grain(Edge edge, const Call& call, int32 block) {
  const Shape& s = call.shape;
  const Word per_block = static_cast<Word>(arrivals(edge, call));
  const bool is_ablated = s.is_minibatch_grain && (edge == Edge::x_ready || edge == Edge::y_ready ||
                                                   edge == Edge::d_y_ready || edge == Edge::d_x_ready);
  if (!is_ablated) return Grain{block, per_block};
  const int32 macrobatch = block_macrobatch(s, block), slot = block_slot(s, block);
  return Grain{slot_index(s, macrobatch, slot), per_block * static_cast<Word>(slot_num_blocks(call, macrobatch, slot))};
}

}  // namespace mok
