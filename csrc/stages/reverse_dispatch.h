// reverse_dispatch: gradients of the inputs go back to the routes of their tokens.
//
// Push, whatever way dispatch takes: d_x of a row goes to the cell of its route in the source's combine buffer, and d_router,
// a sum over the expert's width, beside it. Each cell has one writer. Where gate_up_dgrad and reverse_dispatch share a
// kernel, gate_up_dgrad's stores go there themselves.
#pragma once

#include "stages/stage.h"

namespace mok {

// d_router of the block's rows [first_row, first_row + num_rows): 32-column groups in ascending order.
template <class Worker>
MOK_DEVICE void push_d_router(const Call& call, Worker& worker, int32 block, int32 first_row, int32 num_rows) {
  const int64 first = int64{block} * call.shape.row_block() + first_row;
  const int32 num_groups = call.shape.intermediate_size / kLaneCols;
  worker.for_each(num_rows, [&](int32 i) {
    const int32 dst_rank = call.schedule.peer_rank[first + i];
    if (dst_rank < 0) return;
    const float* partials = router_partials(call, block, first_row + i);
    float sum = 0.0f;
    for (int32 group = 0; group < num_groups; ++group) sum += partials[group];
    call.peer<float>(Region::d_router, dst_rank)[call.schedule.peer_token_idx[first + i]] = sum;
  });
}

struct ReverseDispatch {
  static constexpr Stage kStage = Stage::reverse_dispatch;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Grain grain = signal_grain(Edge::d_x_ready, args.call, task.block);
    return signals.wait_local(Edge::d_x_ready, grain.index, grain.want);
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first = task.part * kCopyRows;
    worker.copy_rows(
        kCopyRows, call.shape.hidden_size * int64{sizeof(bf16)},
        [&](int32 i) { return combine_destination(call, int64{task.block} * call.shape.row_block() + first + i); },
        [&](int32 i) { return d_x_row(call, task.block, first + i); });
    push_d_router(call, worker, task.block, first, kCopyRows);
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    free_slot(args.call, task.block, signals);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kCopyRows, kCopyRows);
    const int64 partials = call.shape.intermediate_size / kLaneCols + 1;
    return Cost{rows, rows * (2 * call.shape.hidden_size * int64{sizeof(bf16)} + partials * int64{sizeof(float)}),
                rows * partials};
  }
};

}  // namespace mok
