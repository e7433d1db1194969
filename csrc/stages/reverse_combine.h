// reverse_combine: gradients of the outputs go from their tokens to the rows that made them.
//
// Pull, whatever way combine takes: the rank that owns the expert reads d_output of each row's token from its source,
// and the route's router weight with it.
#pragma once

#include "stages/token_rows.h"

namespace mok {

struct ReverseCombine {
  static constexpr Stage kStage = Stage::reverse_combine;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return wait_slot_free(args.call, task.block, signals) && wait_row_sources(args.call, task, signals);
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first_in_block = task.part * kCopyRows;
    const int64 first = int64{task.block} * call.shape.row_block() + first_in_block;
    pull_token_rows(
        call, worker, task, Region::d_output, [&](int32 i) { return d_y_row(call, task.block, first_in_block + i); },
        [](int32) -> const bf16* { return nullptr; });
    float* weights = row_weight(call, task.block, first_in_block);
    worker.for_each(kCopyRows, [&](int32 i) {
      const int32 src_rank = call.schedule.peer_rank[first + i];
      weights[i] = src_rank < 0
                       ? 0.0f
                       : call.peer<float>(Region::router_weights, src_rank)[call.schedule.peer_token_idx[first + i]];
    });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    signals.add(Edge::d_y_ready, signal_grain(Edge::d_y_ready, args.call, task.block).index);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kCopyRows, kCopyRows);
    return Cost{rows, token_rows_bytes(call, rows) + 2 * rows * int64{sizeof(float)}, 0};
  }
};

}  // namespace mok
