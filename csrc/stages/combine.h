// combine: expert outputs go back to the routes of their tokens.
//
// Push (the default): the expert's owner writes row token*K+k of the source's combine buffer; each
// cell has one writer. Where down and combine share a kernel, down's store pass writes there itself.
// Pull (an ablation): the source reads the owner's y; the ring must hold all rows.
#pragma once

#include "stages/stage.h"

namespace mok {

struct CombinePush {
  static constexpr Stage kStage = Stage::combine;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Grain grain = signal_grain(Edge::y_ready, args.call, task.block);
    return signals.wait_local(Edge::y_ready, grain.index, grain.want);
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first = task.part * kCopyRows;
    worker.copy_rows(
        kCopyRows, call.shape.hidden_size * int64{sizeof(bf16)},
        [&](int32 i) { return combine_destination(call, int64{task.block} * call.shape.row_block() + first + i); },
        [&](int32 i) { return y_row(call, task.block, first + i); });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    free_slot(args.call, task.block, signals);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kCopyRows, kCopyRows);
    return Cost{rows, 2 * rows * call.shape.hidden_size * int64{sizeof(bf16)}, 0};
  }
};

struct CombinePull {
  static constexpr Stage kStage = Stage::combine;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    const int32 rows = call.shape.is_minibatch_grain ? call.shape.minibatch : call.shape.row_block();
    for (int32 i = 0; i < num_routes(call, task); ++i) {
      const int32 idx = task.part * kCopyRows + i, owner = call.schedule.route_rank[idx];
      if (owner < 0) continue;
      if (!signals.wait_arrival(Edge::y_arrived, call.schedule.route_row[idx] / rows, owner)) return false;
    }
    return true;
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int64 width = call.shape.hidden_size, first = int64{task.part} * kCopyRows;
    worker.copy_rows(
        num_routes(call, task), width * sizeof(bf16),
        [&](int32 i) {
          return call.schedule.route_rank[first + i] < 0 ? nullptr
                                                         : call.at<bf16>(Region::combine) + (first + i) * width;
        },
        [&](int32 i) -> const bf16* {
          const int32 owner = call.schedule.route_rank[first + i];
          return owner < 0 ? nullptr
                           : call.peer<bf16>(Region::ring_y, owner) + call.schedule.route_row[first + i] * width;
        });
  }

  // Nobody in the rank waits for a pulled row: reduce is a later kernel of the same stream.
  template <class Worker>
  MOK_DEVICE static void publishes(const Args&, const Task&, Signals<Worker>&) {}

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    int64 rows = 0;
    for (int32 i = 0; i < num_routes(call, task); ++i) rows += call.schedule.route_rank[task.part * kCopyRows + i] >= 0;
    return Cost{rows, 2 * rows * call.shape.hidden_size * int64{sizeof(bf16)}, 0};
  }

 private:
  MOK_DEVICE static int32 num_routes(const Call& call, const Task& task) {
    return min_of(kCopyRows, call.num_tokens * call.shape.topk - task.part * kCopyRows);
  }
};

// The way that the shape says.
struct Combine {
  static constexpr Stage kStage = Stage::combine;
};
template <class F>
MOK_DEVICE bool in_its_way(const Shape& shape, Combine, F&& f) {
  return shape.is_pull_combine ? f(CombinePull{}) : f(CombinePush{});
}

}  // namespace mok
