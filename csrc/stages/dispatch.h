// dispatch: rows go from their tokens to their experts.
//
// Pull (the default): the rank that owns the expert reads each row from the source's published x into
// its own ring slot. Nobody coordinates destinations, and a hot rank spreads its reads over all links.
// Pull once (an option, BF16): a token that several experts of a rank want crosses the link once, for the first of its rows
// there; the others are copied from that one, as soon as its block is complete. Rows are dispatched in their order, so
// that a task waits for lower tasks only; the ring must hold all rows, so that the first one is still there.
// Push (an ablation): the source writes its rows into the owners' rings; it must know that the owner
// has entered the call, and the ring must hold all rows.
#pragma once

#include "stages/token_rows.h"

namespace mok {

// Pull once: the row from which `row` is copied inside this rank; negative: it comes from its source. Never one that the
// same signal announces (a token may name an expert twice): its wait would be for itself.
MOK_DEVICE int32 row_here(const Call& call, int32 row) {
  const Shape& s = call.shape;
  const int32 src_rank = call.schedule.peer_rank[row];
  if (!s.is_pull_once || src_rank < 0 || src_rank == call.rank) return -1;
  const int32 first =
      call.schedule
          .token_row[int64{src_rank} * call.schedule.token_row_stride + call.schedule.peer_token_idx[row] / s.topk];
  const int32 rows = s.is_minibatch_grain ? s.minibatch : s.row_block();
  return first / rows < row / rows ? first : -1;
}

struct DispatchPull {
  static constexpr Stage kStage = Stage::dispatch;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return needs_of_other_kernels(args, task, signals) &&
           (!args.call.shape.is_pull_once || wait_rows_here(args.call, task, signals));
  }
  // Without the rows that are copied inside this rank: tasks of this very stage bring them.
  template <class Worker>
  MOK_DEVICE static bool needs_of_other_kernels(const Args& args, const Task& task, Signals<Worker>& signals) {
    return wait_slot_free(args.call, task.block, signals) && wait_row_sources(args.call, task, signals);
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 row_block = call.shape.row_block();
    pull_token_rows(
        call, worker, task, call.shape.is_mxfp8_wire() ? Region::x_quantized : Region::x,
        [&](int32 i) { return x_row(call, task.block, task.part * kCopyRows + i); },
        [&](int32 row) -> const bf16* {
          const int32 from = row_here(call, row);
          return from < 0 ? nullptr : x_row(call, from / row_block, from % row_block);
        });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    signals.add(Edge::x_ready, signal_grain(Edge::x_ready, args.call, task.block).index);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kCopyRows, kCopyRows);
    return Cost{rows, token_rows_bytes(call, rows), 0};
  }

 private:
  // Neighbours mostly come from one block.
  template <class Worker>
  MOK_DEVICE static bool wait_rows_here(const Call& call, const Task& task, Signals<Worker>& signals) {
    const int32 first = task.block * call.shape.row_block() + task.part * kCopyRows;
    int32 seen = -1;
    for (int32 i = 0; i < kCopyRows; ++i) {
      const int32 from = row_here(call, first + i);
      if (from < 0 || from / call.shape.row_block() == seen) continue;
      seen = from / call.shape.row_block();
      const Grain grain = signal_grain(Edge::x_ready, call, seen);
      if (!signals.wait_local(Edge::x_ready, grain.index, grain.want)) return false;
    }
    return true;
  }
};

struct DispatchPush {
  static constexpr Stage kStage = Stage::dispatch;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    // A push dispatch waits for `entered` where a pull waits for inputs: one set of seen ranks serves.
    SeenRanks& seen = signals.seen_inputs();
    for (int32 i = 0; i < num_routes(args.call, task); ++i) {
      const int32 owner = args.call.schedule.route_rank[route(args.call, task, i)];
      if (!signals.wait_rank_once(Edge::entered, owner, seen)) return false;
    }
    return true;
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int64 width = call.shape.hidden_size;
    bring_rows(
        call, worker, num_routes(call, task),
        [&](int32 i) {
          const int32 idx = route(call, task, i);
          return call.peer<bf16>(Region::ring_x, call.schedule.route_rank[idx]) + call.schedule.route_row[idx] * width;
        },
        [&](int32 i) { return call.tensors.x + route(call, task, i) / call.shape.topk * width; });
  }

  // Rows are pushed in the owners' order, so a task touches a few row blocks; whoever completes this
  // rank's share of a block (or slot) tells its owner.
  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    const int32 count = num_routes(call, task);
    for (int32 i = 0; i < count;) {
      int32 end = i + 1;
      while (end < count && is_same_signal(call, position(task, i), position(task, end))) ++end;
      const int32 idx = route(call, task, i), owner = call.schedule.route_rank[idx];
      const int64 signal = signal_of(call, idx);
      const int64 counter = int64{owner} * call.shape.capacity_blocks() + signal;
      const Word total = share(call, position(task, i));
      if (signals.arrive(Edge::pushed, counter, total, end - i)) signals.set_arrival(Edge::x_arrived, signal, owner);
      i = end;
    }
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_routes(call, task);
    return Cost{rows, 2 * rows * call.shape.hidden_size * int64{sizeof(bf16)}, 0};
  }

 private:
  MOK_DEVICE static int32 position(const Task& task, int32 i) { return task.part * kCopyRows + i; }
  MOK_DEVICE static int32 num_routes(const Call& call, const Task& task) {
    return min_of(kCopyRows, call.schedule.counts[kCountRoutes] - task.part * kCopyRows);
  }
  MOK_DEVICE static int32 route(const Call& call, const Task& task, int32 i) {
    return call.schedule.sorted_route[position(task, i)];
  }
  MOK_DEVICE static int64 signal_of(const Call& call, int32 idx) {
    const int32 rows = call.shape.is_minibatch_grain ? call.shape.minibatch : call.shape.row_block();
    return call.schedule.route_row[idx] / rows;
  }
  MOK_DEVICE static bool is_same_signal(const Call& call, int32 a, int32 b) {
    const int32 ra = call.schedule.sorted_route[a], rb = call.schedule.sorted_route[b];
    return call.schedule.route_rank[ra] == call.schedule.route_rank[rb] && signal_of(call, ra) == signal_of(call, rb);
  }
  // How many rows this rank sends to the signal's rows: they are neighbours in the sorted order.
  MOK_DEVICE static Word share(const Call& call, int32 at) {
    int32 begin = at, end = at + 1;
    while (begin > 0 && is_same_signal(call, begin - 1, at)) --begin;
    while (end < call.schedule.counts[kCountRoutes] && is_same_signal(call, end, at)) ++end;
    return static_cast<Word>(end - begin);
  }
};

// The way that the shape says.
struct Dispatch {
  static constexpr Stage kStage = Stage::dispatch;
};
template <class F>
MOK_DEVICE bool in_its_way(const Shape& shape, Dispatch, F&& f) {
  return shape.is_push_dispatch ? f(DispatchPush{}) : f(DispatchPull{});
}

}  // namespace mok
