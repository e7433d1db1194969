// Ring arithmetic: generations, slots, which earlier use of a slot a task must wait for, and how far stages are apart.
//
// Rows of a rank: [0, num_rows), whole row blocks. Macrobatch m holds rows [m*ring_rows, ...); it is
// one pass (a generation) through the ring. Forward walks macrobatches from last to first, so that
// macrobatch 0, whose activations the context keeps, comes last; backward from first to last. Slot j of a macrobatch is its j-th
// window of `minibatch` rows. Slots never move; work windows may snap to expert boundaries.
#pragma once

#include "call.h"

namespace mok {

MOK_DEVICE int32 num_rows(const Call& call) { return call.schedule.counts[kCountRows]; }

MOK_DEVICE int32 num_generations(const Call& call) { return ceil_div(num_rows(call), call.shape.ring_rows); }

// The macrobatch that generation `generation` (in launch order) works on. A recomputation has one generation.
MOK_DEVICE int32 macrobatch_of(const Call& call, int32 generation) {
  return call.kind == CallKind::forward ? num_generations(call) - 1 - generation : generation;
}

// A ring is whole row blocks, so 32-bit block arithmetic is enough.
MOK_DEVICE int32 block_macrobatch(const Shape& s, int32 block) { return block / (s.ring_rows / s.row_block()); }
// Where a row block starts inside the ring (or inside the context, which has the ring's shape).
MOK_DEVICE int64 block_ring_row(const Shape& s, int32 block) {
  return int64{block % (s.ring_rows / s.row_block())} * s.row_block();
}

MOK_DEVICE int32 block_slot(const Shape& s, int32 block) {
  return static_cast<int32>(block_ring_row(s, block) / s.minibatch);
}

MOK_DEVICE int64 slot_index(const Shape& s, int32 macrobatch, int32 slot) {
  return int64{macrobatch} * s.slots_per_ring() + slot;
}

// Row blocks of a slot in a macrobatch; 0 where the last, partial macrobatch does not reach it.
MOK_DEVICE int32 slot_num_blocks(const Call& call, int32 macrobatch, int32 slot) {
  const Shape& s = call.shape;
  const int64 begin = int64{macrobatch} * s.ring_rows + int64{slot} * s.minibatch;
  const int64 end = min_of(min_of(begin + s.minibatch, (int64{macrobatch} + 1) * s.ring_rows), int64{num_rows(call)});
  return end > begin ? static_cast<int32>((end - begin) / s.row_block()) : 0;
}

// The macrobatch that used this slot before in this call, or -1. In a forward the one before is m + 1; where it is the
// partial last one and never reached the slot, nobody used it. (Its frees imply those of m + 2: its own
// dispatch waited for them. Counting "generations before" instead would wait for frees that never come.)
MOK_DEVICE int32 slot_predecessor(const Call& call, int32 macrobatch, int32 slot) {
  if (call.kind != CallKind::forward) return macrobatch - 1;  // a full one, or none
  const bool is_used = macrobatch + 1 < num_generations(call) && slot_num_blocks(call, macrobatch + 1, slot) > 0;
  return is_used ? macrobatch + 1 : -1;
}

// By how many windows of the ring a stage is behind, in the order of tasks of a kernel that holds several: copies and stores
// of one window then go on beside products of another. Two for down and combine: with one, a single window of down
// stands between a window of gate_up and its down, and takes hardly longer than the last tiles of gate_up (docs/performance.md).
MOK_DEVICE int32 window_lag(Stage stage) {
#define MOK_OR_TWO(name, Type, file, place, pass, work, block_tasks, lag, inside) || (lag == 2 && stage == Stage::name)
#define MOK_OR_ONE(name, Type, file, place, pass, work, block_tasks, lag, inside) || (lag == 1 && stage == Stage::name)
  if (false MOK_STAGES(MOK_OR_TWO)) return 2;
  return false MOK_STAGES(MOK_OR_ONE);
#undef MOK_OR_TWO
#undef MOK_OR_ONE
}

}  // namespace mok
