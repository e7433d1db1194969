// How many arrivals complete a signal: one function, used by writers and readers alike.
#pragma once

#include "protocol/ring.h"

namespace mok {

// Tasks of one row block (or token block) of a stage, by the roster's names.
MOK_DEVICE int32 num_copy_tasks(const Shape& s) { return s.row_block() / kCopyRows; }
MOK_DEVICE int32 num_element_tasks(const Shape& s) { return s.row_block() / kElementRows; }
MOK_DEVICE int32 num_gate_up_tiles(const Shape& s) { return ceil_div(s.intermediate_size, kGateUpCols); }
MOK_DEVICE int32 num_down_tiles(const Shape& s) { return ceil_div(s.hidden_size, kDownCols); }
MOK_DEVICE int32 num_shared_gate_up_tiles(const Shape& s) { return ceil_div(s.shared_size, kGateUpCols); }
MOK_DEVICE int32 num_down_dgrad_tiles(const Shape& s) { return ceil_div(s.intermediate_size, kDownCols); }
MOK_DEVICE int32 num_shared_down_dgrad_tiles(const Shape& s) { return ceil_div(s.shared_size, kDownCols); }
MOK_DEVICE int32 num_block_tasks(Stage stage, const Shape& s) {
  if (has_tasks<BlockTasks::copies>(stage)) return num_copy_tasks(s);
  if (has_tasks<BlockTasks::elements>(stage)) return num_element_tasks(s);
  if (has_tasks<BlockTasks::down_dgrad_tiles>(stage)) return num_down_dgrad_tiles(s);
  if (has_tasks<BlockTasks::shared_down_dgrad_tiles>(stage)) return num_shared_down_dgrad_tiles(s);
  if (has_tasks<BlockTasks::gate_up_tiles>(stage)) return num_gate_up_tiles(s);
  if (has_tasks<BlockTasks::shared_gate_up_tiles>(stage)) return num_shared_gate_up_tiles(s);
  return num_down_tiles(s);
}

MOK_DEVICE int32 num_publish_tasks(const Call& call) {
  return call.is_input_in_place() ? 1 : max_of(1, ceil_div(call.num_tokens, kPublishRows));
}

// Whether a stage is done by the tasks of the one that the roster says it is inside: in its epilogue, or its stores.
// A pulled combine is not: its rows go to the ring.
MOK_DEVICE bool is_inside(Stage stage, Stage outer, const Call& call) {
  return call.share_kernel(outer, stage) && !(stage == Stage::combine && call.shape.is_pull_combine);
}
MOK_DEVICE bool is_swiglu_in_gate_up(const Call& call) { return is_inside(Stage::swiglu, Stage::gate_up, call); }
MOK_DEVICE bool is_combine_in_down(const Call& call) { return is_inside(Stage::combine, Stage::down, call); }
MOK_DEVICE bool is_swiglu_backward_in_down_dgrad(const Call& call) {
  return is_inside(Stage::swiglu_backward, Stage::down_dgrad, call);
}
MOK_DEVICE bool is_reverse_dispatch_in_gate_up_dgrad(const Call& call) {
  return is_inside(Stage::reverse_dispatch, Stage::gate_up_dgrad, call);
}
// Then it has no tasks of its own.
MOK_DEVICE bool has_no_tasks(Stage stage, const Call& call) {
#define MOK_IF_INSIDE(name, Type, file, place, pass, work, tasks, lag, inside) \
  if constexpr (Stage::inside != Stage::none)                                  \
    if (stage == Stage::name && is_inside(Stage::name, Stage::inside, call)) return true;
  MOK_STAGES(MOK_IF_INSIDE)
#undef MOK_IF_INSIDE
  return false;
}

// Tasks of a row block that do a stage's work: its own, or those of the stage that it is inside.
template <Stage kStage>
MOK_DEVICE int32 num_tasks_doing(const Call& call) {
  constexpr Stage kOuter = row_of(kStage).inside;
  if constexpr (kOuter != Stage::none)
    if (is_inside(kStage, kOuter, call)) return num_block_tasks(kOuter, call.shape);
  return num_block_tasks(kStage, call.shape);
}
// Of several: those of the call's pass.
template <Stage... kStage>
MOK_DEVICE int32 num_tasks_of(const Call& call) {
  if constexpr (sizeof...(kStage) == 1) {
    return (num_tasks_doing<kStage>(call), ...);
  } else {
    static_assert(((row_of(kStage).pass != Pass::replayed) && ...), "a replayed stage is of both passes");
    return (0 + ... + (is_backward(row_of(kStage).pass) == call.is_backward() ? num_tasks_doing<kStage>(call) : 0));
  }
}

// Arrivals of one row block (or token block) on an edge inside a rank: the tasks that the roster lists. slot_free of a
// backward: without those of the weight gradients, see slot_frees. segment_ready: of each of a segment's row blocks, by
// the last stage that leaves something for weight gradients.
MOK_DEVICE int32 arrivals(Edge edge, const Call& call) {
  using enum Stage;
  if (edge == Edge::segment_ready && call.shape.is_mxfp8()) return num_tasks_doing<quantize>(call);
  switch (edge) {
#define MOK_LIST(...) <__VA_ARGS__>
#define MOK_ARRIVALS_CASE(name, scope, epoch, cells, pass, arrivals, writers, readers) \
  case Edge::name:                                                                     \
    return num_tasks_of MOK_LIST arrivals(call);
    MOK_EDGES(MOK_ARRIVALS_CASE)
#undef MOK_ARRIVALS_CASE
#undef MOK_LIST
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
MOK_DEVICE int64 carry_index(const Call& call, int32 unit, int32 macrobatch) {
  return int64{macrobatch} * num_carry_units(call.shape) + unit;
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
  return frees + num_experts * static_cast<Word>(num_wgrad_tiles(s.hidden_size, s.intermediate_size));
}

// Which counter an edge by row blocks has, and what makes it complete: per row block, or (an ablation, for the edges whose
// cells the roster calls row_blocks_or_slots) per minibatch slot.
struct Grain {
  int64 index;
  Word want;
};
MOK_DEVICE Grain signal_grain(Edge edge, const Call& call, int32 block) {
  const Shape& s = call.shape;
  const Word per_block = static_cast<Word>(arrivals(edge, call));
  const bool is_ablated = s.is_minibatch_grain && has_grain(edge);
  if (!is_ablated) return Grain{block, per_block};
  const int32 macrobatch = block_macrobatch(s, block), slot = block_slot(s, block);
  return Grain{slot_index(s, macrobatch, slot), per_block * static_cast<Word>(slot_num_blocks(call, macrobatch, slot))};
}

}  // namespace mok
