// How many arrivals complete a signal: one function, used by writers and readers alike.
#pragma once

#include "protocol/ring.h"

namespace mok {

MOK_DEVICE int32 num_gate_up_tiles(const Shape& s) { return ceil_div(s.intermediate_size, kGateUpCols); }
MOK_DEVICE int32 num_down_tiles(const Shape& s) { return ceil_div(s.hidden_size, kDownCols); }
MOK_DEVICE int32 num_shared_gate_up_tiles(const Shape& s) { return ceil_div(s.shared_size, kGateUpCols); }
MOK_DEVICE int32 num_publish_tasks(const Call& call) { return max_of(1, ceil_div(call.num_tokens, kPublishRows)); }
MOK_DEVICE int32 num_copy_tasks(const Shape& s) { return s.row_block() / kCopyRows; }

// down pushes its rows itself: no y in the ring, no combine task.
MOK_DEVICE bool is_combine_in_down(const Call& call) {
  return call.share_kernel(Stage::down, Stage::combine) && !call.shape.is_pull_combine;
}
MOK_DEVICE bool is_swiglu_in_gate_up(const Call& call) { return call.share_kernel(Stage::gate_up, Stage::swiglu); }

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
    case Edge::slot_free:
      return is_combine_in_down(call) ? num_down_tiles(s) : num_copy_tasks(s);
    case Edge::shared_hidden_ready:
      return num_shared_gate_up_tiles(s);
    case Edge::shared_ready:
      return num_down_tiles(s);
    default:
      return 0;
  }
}

// Where a row block's x_ready or y_ready stands, and what makes it complete: per row block, or per
// minibatch slot (an ablation).
struct Grain {
  int64 index;
  Word want;
};
MOK_DEVICE Grain signal_grain(Edge edge, const Call& call, int32 block) {
  const Shape& s = call.shape;
  const Word per_block = static_cast<Word>(arrivals(edge, call));
  const bool is_ablated = s.is_minibatch_grain && (edge == Edge::x_ready || edge == Edge::y_ready);
  if (!is_ablated) return Grain{block, per_block};
  const int32 macrobatch = block_macrobatch(s, block), slot = block_slot(s, block);
  return Grain{slot_index(s, macrobatch, slot), per_block * static_cast<Word>(slot_num_blocks(call, macrobatch, slot))};
}

}  // namespace mok
