// schedule: from everybody's top-k ids to this rank's table of rows.
//
// Four kinds of tasks, in this order, the pushes by tickets of their own: where a kernel serves several ranks, those of
// all ranks come before anything that waits for them, however few workers there are.
//   push    a chunk of own ids -> the id region of every rank; the last one says topk_ready
//   count   (source rank, chunk): a histogram over experts
//   layout  one task: segments, windows, padding; turns histograms into prefixes
//   place   (source rank, chunk): every route to its row
// Row order inside an expert: the j-th route of rank 0, of rank 1, ..., then j+1, which spreads the
// load of a pull over all links. A route's row follows from counts alone, so the result does not
// depend on who places it.
//
// Two id regions by parity of the epoch: having topk_ready(e-1) from a rank proves that it has built
// e-2, so epoch e may overwrite that region. The number of tokens travels in the region, not in the word.
#pragma once

#include "stages/stage.h"

namespace mok {

struct ScheduleTask {
  enum Kind { push, count, layout, place } kind;
  int32 src_rank;
  int32 chunk;
};

struct ScheduleStage {
  static constexpr Stage kStage = Stage::schedule;

  MOK_DEVICE static int32 num_push(const Call& call) {
    return max_of(1, ceil_div(call.num_tokens * call.shape.topk, kScheduleChunk));
  }
  MOK_DEVICE static int32 num_chunks(const Call& call) { return call.shape.num_ranks * call.shape.chunks_per_rank(); }

  enum class Part : int32 { pushes, rest };

  // false: no such ticket.
  MOK_DEVICE static bool decode(const Call& call, Part part, int64 ticket, ScheduleTask* task) {
    const int32 chunks = num_chunks(call), per_rank = call.shape.chunks_per_rank();
    if (ticket < 0 || ticket >= (part == Part::pushes ? num_push(call) : 2 * chunks + 1)) return false;
    int32 index = static_cast<int32>(ticket);
    *task = ScheduleTask{ScheduleTask::push, call.rank, index};
    if (part == Part::pushes) return true;
    if (index == chunks) {
      task->kind = ScheduleTask::layout;
      return true;
    }
    task->kind = index < chunks ? ScheduleTask::count : ScheduleTask::place;
    index -= index < chunks ? 0 : chunks + 1;
    task->src_rank = index / per_rank;
    task->chunk = index % per_rank;
    return true;
  }

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const ScheduleTask& task, Signals<Worker>& signals) {
    switch (task.kind) {
      case ScheduleTask::push:
        if (task.chunk == 0) signals.set_all_ranks(Edge::entered);
        return signals.wait_all_ranks(Edge::topk_ready, /*epochs_back=*/1);
      case ScheduleTask::count:
        return signals.wait_rank(Edge::topk_ready, task.src_rank);
      case ScheduleTask::layout:
        return signals.wait_local(Edge::ids_counted, 0, num_chunks(args.call));
      default:
        return signals.wait_local(Edge::laid_out, 0, 1);
    }
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const ScheduleTask& task) {
    switch (task.kind) {
      case ScheduleTask::push:
        return push_tile(args, worker, task);
      case ScheduleTask::count:
        return count_tile(args, worker, task);
      case ScheduleTask::layout:
        return layout_tile(args, worker);
      default:
        return place_tile(args, worker, task);
    }
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const ScheduleTask& task, Signals<Worker>& signals) {
    switch (task.kind) {
      case ScheduleTask::push:
        if (signals.arrive(Edge::ids_pushed, 0, num_push(args.call))) signals.set_all_ranks(Edge::topk_ready);
        return;
      case ScheduleTask::count:
        signals.add(Edge::ids_counted, 0);
        return;
      case ScheduleTask::layout:
        signals.add(Edge::laid_out, 0);
        return;
      default:
        return;
    }
  }

  // Rows of the table once; ids as they are pushed to every rank and read twice there.
  MOK_DEVICE static Cost cost(const Call& call, const ScheduleTask& task) {
    if (task.kind == ScheduleTask::layout) {
      int64 rows = 0;
      for (int32 expert = 0; expert < call.shape.num_local_experts; ++expert)
        rows += call.schedule.segment_num_rows[expert];
      return Cost{rows, 2 * rows * int64{sizeof(int32)}, 0};
    }
    if (task.kind != ScheduleTask::push) return Cost{};
    const int64 ids =
        max_of(0, min_of(kScheduleChunk, call.num_tokens * call.shape.topk - task.chunk * kScheduleChunk));
    return Cost{0, ids * int64{sizeof(int32)} * (1 + 3 * call.shape.num_ranks), 0};
  }

 private:
  // Values that one thread adds up are read so many at a time: a store between two loads would cost a round trip each.
  static constexpr int32 kBatch = 8;

  // Ids of a source rank in this epoch's region.
  MOK_DEVICE static int32* ids_at(const Args& args, int32 at_rank, int32 src_rank) {
    const Shape& s = args.call.shape;
    return args.call.peer<int32>(Region::top_experts, at_rank) +
           ((args.schedule_epoch & 1) * s.num_ranks + src_rank) * s.max_routes();
  }
  MOK_DEVICE static int32* num_tokens_at(const Args& args, int32 at_rank, int32 src_rank) {
    return args.call.peer<int32>(Region::num_tokens, at_rank) + (args.schedule_epoch & 1) * args.call.shape.num_ranks +
           src_rank;
  }
  MOK_DEVICE static int32 num_ids(const Args& args, const ScheduleTask& task) {
    const Call& call = args.call;
    const int32 tokens =
        task.kind == ScheduleTask::push ? call.num_tokens : *num_tokens_at(args, call.rank, task.src_rank);
    return max_of(0, min_of(kScheduleChunk, tokens * call.shape.topk - task.chunk * kScheduleChunk));
  }
  // histogram[src_rank, chunk, expert]: counts, after layout the number of routes in earlier chunks.
  MOK_DEVICE static int32* histogram_of(const Call& call, int32 src_rank, int32 chunk) {
    return call.at<int32>(Region::histogram) +
           (int64{src_rank} * call.shape.chunks_per_rank() + chunk) * call.shape.num_experts();
  }
  // Routes of a source to an expert; layout leaves them behind the prefixes (see layout_tile).
  MOK_DEVICE static int32* totals_of(const Call& call, int32 src_rank) {
    return call.at<int32>(Region::histogram) + int64{num_chunks(call)} * call.shape.num_experts() +
           int64{src_rank} * call.shape.num_experts();
  }

  template <class Worker>
  MOK_DEVICE static void push_tile(const Args& args, Worker& worker, const ScheduleTask& task) {
    const Call& call = args.call;
    if (task.chunk == 0) {
      Word* bank = call.at<Word>(Region::counters) + 2 * call.call_bank +
                   static_cast<int64>((args.schedule_epoch + 1) & 1) * call.schedule_bank;
      worker.for_each(call.schedule_bank, [&](int32 i) { bank[i] = 0; });
      worker.for_each(call.shape.num_ranks,
                      [&](int64 dst) { *num_tokens_at(args, static_cast<int32>(dst), call.rank) = call.num_tokens; });
    }
    const int32 count = num_ids(args, task), first = task.chunk * kScheduleChunk;
    worker.for_each(int64{call.shape.num_ranks} * count, [&](int64 i) {
      const int32 dst = static_cast<int32>(i / count), at = first + static_cast<int32>(i % count);
      const int32 id = call.tensors.top_experts[at];
      const bool is_valid = id >= -1 && id < call.shape.num_experts();
      if (!is_valid && dst == call.rank) worker.report_invalid_id(args);
      ids_at(args, dst, call.rank)[at] = is_valid ? id : -1;
    });
  }

  template <class Worker>
  MOK_DEVICE static void count_tile(const Args& args, Worker& worker, const ScheduleTask& task) {
    const Call& call = args.call;
    int32* histogram = histogram_of(call, task.src_rank, task.chunk);
    const int32* ids = ids_at(args, call.rank, task.src_rank) + task.chunk * kScheduleChunk;
    const int32 count = num_ids(args, task);
    worker.for_each(call.shape.num_experts(), [&](int64 expert) { histogram[expert] = 0; });
    clear_rows(call, worker, task.src_rank * call.shape.chunks_per_rank() + task.chunk, num_chunks(call));
    worker.sync();
    worker.for_each(count, [&](int64 i) {
      if (ids[i] >= 0) worker.add_relaxed(&histogram[ids[i]], 1);
    });
  }

  // A part of the table of rows: what is not placed later is padding.
  template <class Worker>
  MOK_DEVICE static void clear_rows(const Call& call, Worker& worker, int32 part, int32 num_parts) {
    const int32 share = ceil_div(call.shape.capacity_rows, num_parts);
    const int64 first = int64{part} * share;
    worker.for_each(max_of(int64{0}, min_of(int64{share}, call.shape.capacity_rows - first)), [&](int64 i) {
      call.schedule.peer_rank[first + i] = -1;
      call.schedule.peer_token_idx[first + i] = -1;
    });
  }

  // Exclusive prefixes over the chunks of each (source, expert); then segments of the local experts.
  template <class Worker>
  MOK_DEVICE static void layout_tile(const Args& args, Worker& worker) {
    const Call& call = args.call;
    const Shape& s = call.shape;
    if (num_chunks(call) == 0) clear_rows(call, worker, 0, 1);  // nobody counts
    worker.for_each(int64{s.num_ranks} * s.num_experts(), [&](int64 i) {
      const int32 src = static_cast<int32>(i / s.num_experts()), expert = static_cast<int32>(i % s.num_experts());
      int32 total = 0;
      for (int32 begin = 0; begin < s.chunks_per_rank(); begin += kBatch) {
        int32* cells = histogram_of(call, src, begin) + expert;
        const int32 num = min_of(kBatch, s.chunks_per_rank() - begin);
        int32 here[kBatch];
        MOK_UNROLL
        for (int32 i = 0; i < kBatch; ++i) here[i] = i < num ? cells[int64{i} * s.num_experts()] : 0;
        MOK_UNROLL
        for (int32 i = 0; i < kBatch; ++i) {
          if (i < num) cells[int64{i} * s.num_experts()] = total;
          total += here[i];
        }
      }
      totals_of(call, src)[expert] = total;
    });
    worker.sync();
    worker.for_each(s.num_local_experts, [&](int64 local) {
      call.schedule.segment_num_rows[local] =
          expert_total(call, call.rank * s.num_local_experts + static_cast<int32>(local));
    });
    worker.sync();
    worker.once([&] { layout_segments(args, worker); });
    worker.sync();
    worker.for_each(num_rows(call) / s.row_block(), [&](int64 block) {
      int32 expert = 0;
      while (call.schedule.segment_start[expert + 1] <= block * s.row_block()) ++expert;
      call.schedule.row_block_expert[block] = expert;
    });
    worker.sync();
    worker.once([&] { layout_windows(call); });
  }

  MOK_DEVICE static int32 expert_total(const Call& call, int32 expert) {
    int32 total = 0;
    for (int32 src = 0; src < call.shape.num_ranks; ++src) total += totals_of(call, src)[expert];
    return total;
  }

  template <class Worker>
  MOK_DEVICE static void layout_segments(const Args& args, Worker& worker) {
    const Call& call = args.call;
    const Shape& s = call.shape;
    const Schedule& schedule = call.schedule;
    int64 start = 0;
    int32 num_routes = 0;
    for (int32 begin = 0; begin < s.num_local_experts; begin += kBatch) {
      int32 num_rows[kBatch];
      MOK_UNROLL
      for (int32 i = 0; i < kBatch; ++i)
        num_rows[i] = begin + i < s.num_local_experts ? schedule.segment_num_rows[begin + i] : 0;
      MOK_UNROLL
      for (int32 i = 0; i < kBatch; ++i) {
        if (begin + i < s.num_local_experts) schedule.segment_start[begin + i] = static_cast<int32>(start);
        start += ceil_div(int64{num_rows[i]}, int64{s.row_block()}) * s.row_block();
      }
    }
    for (int32 expert = 0; expert < s.num_experts(); ++expert) num_routes += totals_of(call, call.rank)[expert];
    // More rows than planned: none is placed, and the caller raises an error with both numbers.
    const bool is_over = start > s.capacity_rows;
    if (is_over) worker.report_overflow(args, start);
    if (is_over)
      for (int32 local = 0; local < s.num_local_experts; ++local)
        schedule.segment_start[local] = schedule.segment_num_rows[local] = 0;
    schedule.segment_start[s.num_local_experts] = is_over ? 0 : static_cast<int32>(start);
    schedule.counts[kCountRows] = is_over ? 0 : static_cast<int32>(start);
    schedule.counts[kCountRoutes] = num_routes;
    schedule.counts[kCountBuild] = static_cast<int32>(args.schedule_epoch);  // all ranks must use the same build
    schedule.counts[kCountWantedRows] = static_cast<int32>(start);
  }

  // Windows of about a minibatch that end at expert boundaries where they can: a cut expert's weights are read twice. So a
  // window ends with the last expert that it holds as a whole; one that is longer is cut, but for a rest of up to half a
  // minibatch. With signals per minibatch slot, windows are the slots.
  MOK_DEVICE static void layout_windows(const Call& call) {
    const Shape& s = call.shape;
    const Schedule& schedule = call.schedule;
    const int32 num_blocks = num_rows(call) / s.row_block(), ring_blocks = s.ring_rows / s.row_block();
    int32 window = 0, block = 0;
    for (int32 macrobatch = 0; macrobatch < num_generations(call); ++macrobatch) {
      const int32 end = min_of((macrobatch + 1) * ring_blocks, num_blocks);
      schedule.generation_window[macrobatch] = window;
      while (block < end) {
        int32 next = min_of(block + s.blocks_per_slot(), end);
        if (!s.is_minibatch_grain && next < end) {
          const int32* segment = schedule.segment_start + schedule.row_block_expert[next];
          const int32 begin_block = segment[0] / s.row_block(), end_block = segment[1] / s.row_block();
          if (begin_block > block)
            next = begin_block;
          else if (end_block - block <= s.blocks_per_slot() + s.blocks_per_slot() / 2)
            next = min_of(end_block, end);
        }
        schedule.window_start[window++] = block;
        block = next;
      }
    }
    schedule.window_start[window] = num_blocks;
    schedule.generation_window[num_generations(call)] = window;
    schedule.counts[kCountWindows] = window;
  }

  template <class Worker>
  MOK_DEVICE static void place_tile(const Args& args, Worker& worker, const ScheduleTask& task) {
    const Call& call = args.call;
    const Shape& s = call.shape;
    const int32* ids = ids_at(args, call.rank, task.src_rank) + task.chunk * kScheduleChunk;
    const int32* prefix = histogram_of(call, task.src_rank, task.chunk);
    const bool is_own = task.src_rank == call.rank;
    worker.for_each(num_ids(args, task), [&](int64 i) {
      const int32 expert = ids[i], idx = task.chunk * kScheduleChunk + static_cast<int32>(i);
      const int32 owner = expert < 0 ? -1 : expert / s.num_local_experts;
      if (is_own) call.schedule.route_rank[idx] = owner;
      if (is_own && owner < 0) call.schedule.route_row[idx] = -1;
      if (owner < 0 || (!is_own && owner != call.rank)) return;
      int32 order = prefix[expert];
      for (int64 before = 0; before < i; ++before) order += ids[before] == expert;
      const int32 row = expert_start(call, expert) + row_in_expert(call, expert, task.src_rank, order);
      if (is_own) {
        call.schedule.route_row[idx] = row;
        call.schedule.sorted_route[own_start(call, expert) + order] = idx;
      }
      if (owner == call.rank && num_rows(call) > 0) {
        call.schedule.peer_rank[row] = task.src_rank;
        call.schedule.peer_token_idx[row] = idx;
        if (s.is_pull_once && is_first_here(call, ids_at(args, call.rank, task.src_rank), expert, idx))
          call.schedule.token_row[int64{task.src_rank} * call.schedule.token_row_stride + idx / s.topk] = row;
      }
    });
  }

  // Of a token's routes to experts of this rank, the one with the first row: rows are sorted by expert, then by route.
  MOK_DEVICE static bool is_first_here(const Call& call, const int32* ids, int32 expert, int32 idx) {
    const int32 topk = call.shape.topk, first = idx / topk * topk;
    const int32 first_expert = call.rank * call.shape.num_local_experts;
    bool is_first = true;
    for (int32 other = first; other < first + topk; ++other)
      is_first &= ids[other] < first_expert || ids[other] > expert || (ids[other] == expert && other >= idx);
    return is_first;
  }

  // First row of an expert on its owner.
  MOK_DEVICE static int32 expert_start(const Call& call, int32 expert) {
    const Shape& s = call.shape;
    const int32 owner = expert / s.num_local_experts;
    if (owner == call.rank) return call.schedule.segment_start[expert % s.num_local_experts];
    int32 start = 0;
    for (int32 before = owner * s.num_local_experts; before < expert; ++before)
      start += ceil_div(expert_total(call, before), s.row_block()) * s.row_block();
    return start;
  }
  // All j-th routes of every rank, j < order, then those of lower ranks with j == order.
  MOK_DEVICE static int32 row_in_expert(const Call& call, int32 expert, int32 src_rank, int32 order) {
    int32 row = 0;
    for (int32 src = 0; src < call.shape.num_ranks; ++src) {
      const int32 total = totals_of(call, src)[expert];
      row += min_of(total, order) + (src < src_rank && total > order ? 1 : 0);
    }
    return row;
  }
  // Where an expert's routes start in this rank's own routes sorted by expert.
  MOK_DEVICE static int32 own_start(const Call& call, int32 expert) {
    int32 start = 0;
    for (int32 before = 0; before < expert; ++before) start += totals_of(call, call.rank)[before];
    return start;
  }
};

}  // namespace mok
