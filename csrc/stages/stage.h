// What every stage file needs, and the contract of a stage.
//
// A copy or element stage is a struct with
//   kStage, kIsCopyOnly           copy-only stages may run on spare warps of a GEMM kernel
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

// Row `row_in_block` of a ring region, or of the context where macrobatch 0 is kept there.
MOK_DEVICE bf16* ring_row(const Call& call, Region region, bf16* context, int64 width, int32 block,
                          int32 row_in_block) {
  const bool is_in_context = context && block_macrobatch(call.shape, block) == 0;
  bf16* base = is_in_context ? context : call.at<bf16>(region);
  return base + (block_ring_row(call.shape, block) + row_in_block) * width;
}
MOK_DEVICE bf16* x_row(const Call& call, int32 block, int32 row_in_block) {
  // A pusher writes symmetric memory only; the context's x is then copied from there after the call.
  bf16* context = call.shape.is_push_dispatch ? nullptr : call.tensors.context_x;
  return ring_row(call, Region::ring_x, context, call.shape.hidden_size, block, row_in_block);
}
MOK_DEVICE bf16* gate_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_gate, call.tensors.context_gate, call.shape.intermediate_size, block,
                  row_in_block);
}
MOK_DEVICE bf16* up_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_up, call.tensors.context_up, call.shape.intermediate_size, block, row_in_block);
}
MOK_DEVICE bf16* hidden_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_hidden, nullptr, call.shape.intermediate_size, block, row_in_block);
}
MOK_DEVICE bf16* y_row(const Call& call, int32 block, int32 row_in_block) {
  return ring_row(call, Region::ring_y, nullptr, call.shape.hidden_size, block, row_in_block);
}

}  // namespace mok
