// What every stage file needs, and the contract of a stage.
//
// A copy or element stage is a struct with
//   kStage                        its row in protocol/roster.h
//   needs(args, task, signals)    waits; false: the call is over for this worker
//   tile(args, worker, task)      arithmetic and copies, no signals
//   publishes(args, task, signals)
//   cost(call, task)              what the task moves and computes, for tables and rooflines
// A GEMM stage has decode, operands, element and store in place of tile (see grouped_gemm.h).
// Stage code names no thread: it asks its worker to run a function over n elements (for_each) or to
// copy rows (copy_rows), and works on any target.
#pragma once

#include "protocol/arrivals.h"
#include "protocol/ring.h"
#include "protocol/signals.h"
#include "protocol/tasks.h"

namespace mok {

struct Cost {
  int64 num_rows = 0;
  int64 num_bytes = 0;  // read and written, each operand once
  int64 num_flops = 0;
};

// The real rows (not padding) of `count` rows of a row block from `first` on.
MOK_DEVICE int32 num_valid_rows(const Call& call, int32 block, int32 first, int32 count) {
  const int32 expert = call.schedule.row_block_expert[block];
  const int64 segment_end = int64{call.schedule.segment_start[expert]} + call.schedule.segment_num_rows[expert];
  const int64 valid = segment_end - (int64{block} * call.shape.row_block() + first);
  return static_cast<int32>(max_of(int64{0}, min_of(valid, int64{count})));
}

// Before a slot is written: whatever the macrobatch before left there has been used up.
template <class Worker>
MOK_DEVICE bool wait_slot_free(const Call& call, int32 block, Signals<Worker>& signals) {
  const Shape& s = call.shape;
  const int32 macrobatch = block_macrobatch(s, block), own_slot = block_slot(s, block);
  // Serial ring: the whole ring must be free, not just this slot.
  const int32 begin = s.is_serial_ring ? 0 : own_slot;
  const int32 end = s.is_serial_ring ? s.slots_per_ring() : own_slot + 1;
  for (int32 slot = begin; slot < end; ++slot) {
    const int32 before = slot_predecessor(call, macrobatch, slot);
    if (before < 0) continue;
    if (!signals.wait_local(Edge::slot_free, slot_index(s, before, slot), slot_frees(call, before, slot))) return false;
  }
  return true;
}

// After a row block's rows have been used up: arrivals at its slot, one for each task unless `count` says otherwise.
template <class Worker>
MOK_DEVICE void free_slot(const Call& call, int32 block, Signals<Worker>& signals, Word count = 1) {
  signals.add(Edge::slot_free,
              slot_index(call.shape, block_macrobatch(call.shape, block), block_slot(call.shape, block)), count);
}

// Where an output row goes: the cell of its route at its source; null for padding, which is never sent back.
MOK_DEVICE bf16* combine_destination(const Call& call, int64 row) {
  const int32 dst_rank = call.schedule.peer_rank[row];
  if (dst_rank < 0) return nullptr;
  return call.peer<bf16>(Region::combine, dst_rank) + int64{call.schedule.peer_token_idx[row]} * call.shape.hidden_size;
}

// Row `row_in_block` of a ring region, or of the caller's tensor (the context, what a dgrad apart saves) where that holds
// macrobatch 0.
MOK_DEVICE bf16* ring_row(const Call& call, Region region, bf16* kept, int64 width, int32 block, int32 row_in_block) {
  const bool is_kept = kept && block_macrobatch(call.shape, block) == 0;
  bf16* base = is_kept ? kept : call.at<bf16>(region);
  return base + (block_ring_row(call.shape, block) + row_in_block) * width;
}
// A pusher writes symmetric memory only; the context's x is then copied from there after the call.
MOK_DEVICE bf16* kept_x(const Call& call) {
  return call.shape.is_push_dispatch && !call.is_backward() ? nullptr : call.tensors.context_x;
}
MOK_DEVICE bf16* x_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_x, kept_x(call), call.shape.hidden_size, block, row_in_block);
}
MOK_DEVICE bf16* gate_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_gate, call.tensors.context_gate, call.shape.intermediate_size, block,
                  row_in_block);
}
MOK_DEVICE bf16* up_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_up, call.tensors.context_up, call.shape.intermediate_size, block, row_in_block);
}
// In a backward: the router weight times h.
MOK_DEVICE bf16* hidden_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_hidden, call.tensors.saved_hidden, call.shape.intermediate_size, block,
                  row_in_block);
}
MOK_DEVICE bf16* y_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_y, nullptr, call.shape.hidden_size, block, row_in_block);
}
// The rest is of a backward. d_x of a row stands where a forward has y.
MOK_DEVICE bf16* d_x_row(const Call& call, int32 block, int32 row_in_block) { return y_row(call, block, row_in_block); }
MOK_DEVICE bf16* d_y_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_d_y, call.tensors.saved_d_y, call.shape.hidden_size, block, row_in_block);
}
MOK_DEVICE bf16* d_hidden_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_d_hidden, nullptr, call.shape.intermediate_size, block, row_in_block);
}
MOK_DEVICE bf16* d_gate_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_d_gate, call.tensors.saved_d_gate, call.shape.intermediate_size, block,
                  row_in_block);
}
MOK_DEVICE bf16* d_up_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_d_up, call.tensors.saved_d_up, call.shape.intermediate_size, block, row_in_block);
}
MOK_DEVICE float* row_weight(const Call& call, int32 block, int32 row_in_block) {
  return call.at<float>(Region::ring_weight) + block_ring_row(call.shape, block) + row_in_block;
}
// d_router of a row by groups of kLaneCols columns.
MOK_DEVICE float* router_partials(const Call& call, int32 block, int32 row_in_block) {
  return call.at<float>(Region::router_partials) +
         (block_ring_row(call.shape, block) + row_in_block) * (call.shape.intermediate_size / kLaneCols);
}

// By the last stage that leaves something for weight gradients.
template <class Worker>
MOK_DEVICE void say_segment_ready(const Call& call, int32 block, Signals<Worker>& signals) {
  const int32 expert = call.schedule.row_block_expert[block];
  signals.add(Edge::segment_ready, segment_index(call, expert, block_macrobatch(call.shape, block)));
}

// f(S{}). A stage that is done in one of several ways (dispatch, combine) has an overload that chooses by the shape.
template <class S, class F>
MOK_DEVICE bool in_its_way(const Shape&, S, F&& f) {
  return f(S{});
}

}  // namespace mok
