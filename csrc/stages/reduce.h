// reduce: a token's output from its routes, acc = shared; acc = fmaf(w_k, row_k, acc) for k ascending.
//
// Missing routes are skipped, not read: their cells and weights may hold anything.
#pragma once

#include "stages/stage.h"

namespace mok {

struct Reduce {
  static constexpr Stage kStage = Stage::reduce;
  static constexpr bool kIsCopyOnly = false;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    if (!signals.wait_all_ranks(Edge::done)) return false;
    if (!call.shape.shared_size || num_tokens(call, task) == 0) return true;
    const int32 first = task.part * kReduceTokens / call.shape.row_block;
    return signals.wait_local(Edge::shared_ready, first, arrivals(Edge::shared_ready, call));
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int64 width = call.shape.hidden_size, first = int64{task.part} * kReduceTokens;
    const bf16* shared = call.shape.shared_size ? call.at<bf16>(Region::shared_y) : nullptr;
    const bf16* combined = call.at<bf16>(Region::combine);
    worker.for_each(num_tokens(call, task) * width, [&](int64 i) {
      const int64 token = first + i / width, column = i % width;
      float acc = shared ? to_float(shared[token * width + column]) : 0.0f;
      for (int32 k = 0; k < call.shape.topk; ++k) {
        const int64 route = token * call.shape.topk + k;
        if (call.schedule.route_rank[route] < 0) continue;
        acc = fmaf_f32(call.tensors.router_weights[route], to_float(combined[route * width + column]), acc);
      }
      call.tensors.output[token * width + column] = to_bf16(acc);
    });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args&, const Task&, Signals<Worker>&) {}

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 tokens = num_tokens(call, task), width = call.shape.hidden_size;
    int64 routes = 0;
    for (int64 i = 0; i < tokens * call.shape.topk; ++i)
      routes += call.schedule.route_rank[int64{task.part} * kReduceTokens * call.shape.topk + i] >= 0;
    const int64 rows = routes + tokens + (call.shape.shared_size ? tokens : 0);
    return Cost{tokens, rows * width * int64{sizeof(bf16)}, 2 * routes * width};
  }

 private:
  MOK_DEVICE static int32 num_tokens(const Call& call, const Task& task) {
    return max_of(0, min_of(kReduceTokens, call.num_tokens - task.part * kReduceTokens));
  }
};

}  // namespace mok
