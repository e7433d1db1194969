// Communication inside a GEMM kernel: a warp that publishes, dispatches and pulls combine, beside the products.
//
// By default it is the spare warp of every CTA's first warp group: it costs no SM. It has few registers
// (kProducerRegisters), so rows pass through a small ring in shared memory and the copy engine moves them.
// With CTAs of its own (fwd_num_comm_sms) all four warps of such a CTA's first group do this, and the others leave.
#pragma once

#include "protocol/leave.h"
#include "stages/combine.h"
#include "stages/dispatch.h"
#include "stages/publish.h"
#include "targets/cuda/worker.h"
#include "targets/sm90/shared.h"

namespace mok::sm90 {

constexpr uint32 kHelpBarrier = 3, kHelpThreads = 256 + 32;  // the named barrier of consumers and communicator

// The consumers, until they are dismissed. A call, since inlined it costs the products a register that they lack.
__noinline__ __device__ void help_communicator(const Help& help) {
  constexpr int32 kBatch = 8;
  const int32 warp = static_cast<int32>(threadIdx.x / 32) - 4, lane = static_cast<int32>(lane_idx());
  for (;;) {
    named_sync(kHelpBarrier, kHelpThreads);
    const int32 num_rows = help.num_rows, num_words = help.num_bytes / 16;
    if (num_rows < 0) return;
    for (int32 row = warp; row < num_rows; row += 8) {
      bf16x8* to = reinterpret_cast<bf16x8*>(help.to[row]);
      const bf16x8* from = reinterpret_cast<const bf16x8*>(help.from[row]);
      if (!to) continue;
      for (int32 first = lane; first < num_words; first += 32 * kBatch) {
        bf16x8 words[kBatch];
        MOK_UNROLL
        for (int32 i = 0; i < kBatch; ++i)
          words[i] = from && first + 32 * i < num_words ? from[first + 32 * i] : bf16x8{};
        MOK_UNROLL
        for (int32 i = 0; i < kBatch; ++i)
          if (first + 32 * i < num_words) to[first + 32 * i] = words[i];
      }
    }
    named_sync(kHelpBarrier, kHelpThreads);
  }
}

// The Worker of copy stages, as one warp. Lane 0 is the leader.
class CommWorker {
 public:
  MOK_DEVICE CommWorker(CommRing& ring, int32 launch_idx, int32 num_workers) : ring_(ring), num_workers_(num_workers) {
    waiter_.launch_idx = launch_idx;
    if (is_leader())
      for (int i = 0; i < kCommChunks; ++i) mbarrier_init(smem_address(&ring_.full[i]), 1);
    mbarrier_init_fence();
    __syncwarp();
  }
  // From here on, until they are dismissed, the consumers copy the rows: that of publish, and of the first dispatch, with 32
  // KB under way instead of 12. (Figures in docs/performance.md.)
  MOK_DEVICE void call_helpers(Help& help) { help_ = &help; }
  MOK_DEVICE void dismiss_helpers() {
    if (!help_) return;
    if (is_leader()) help_->num_rows = -1;
    named_sync(kHelpBarrier, kHelpThreads);
    help_ = nullptr;
  }
  MOK_DEVICE void begin_call([[maybe_unused]] const Args& args) {
    seen_inputs = seen_dones = SeenRanks{};
    MOK_TRACED(if (is_leader()) waiter_.track->begin_call(args);)
  }

  MOK_DEVICE int32 num_workers() const { return num_workers_; }
  MOK_DEVICE bool is_leader() const { return lane_idx() == 0; }

  template <class Index, class F>
  MOK_DEVICE void for_each(Index count, F&& f) {
    for (Index i = static_cast<Index>(lane_idx()); i < count; i += 32) f(i);
  }
  MOK_DEVICE void sync() { __syncwarp(); }

  // Lane i finds out where row i comes from and goes to; lane 0 issues all copies. Rows are written when this returns.
  // The products read them soon, so they stay in the L2 as anything else.
  template <class Dst, class Src>
  MOK_DEVICE void copy_rows(int32 count, int64 num_bytes, Dst&& dst, Src&& src,
                            bool /*are_sources_read_again*/ = false) {
    const int32 size = static_cast<int32>(num_bytes), lane = static_cast<int32>(lane_idx());
    uint64 to = 0, from = 0;
    if (lane < count) {  // tasks have at most 32 rows
      to = reinterpret_cast<uint64>(dst(lane));
      if (to) from = reinterpret_cast<uint64>(src(lane));
    }
    if (help_) return copy_with_helpers(count, size, to, from);
    const uint32 cleared = __ballot_sync(0xffffffffu, to != 0 && from == 0);
    copy(__ballot_sync(0xffffffffu, from != 0), size, to, from);
    for (uint32 rows = cleared; rows != 0; rows &= rows - 1) {
      bf16x8* row = reinterpret_cast<bf16x8*>(__shfl_sync(0xffffffffu, to, first_row(rows)));
      for (int32 i = lane; i < size / 16; i += 32) row[i] = bf16x8{};
    }
  }

  // ---- protocol: called by the leader ----
  MOK_DEVICE Word draw(Word* counter) { return atomicAdd(counter, Word{1}); }
  MOK_DEVICE void begin_task(const Task& task) {
    waiter_.task = task;
    MOK_TRACED(if (is_leader()) waiter_.track->next_task(task);)
  }
  MOK_DEVICE void begin_wait(const Wait&) { waiter_.begin(); }
  MOK_DEVICE bool pause(const Args& args, const Wait& wait) { return waiter_.pause(args, wait); }
  MOK_DEVICE void end_wait([[maybe_unused]] const Wait& wait) { MOK_TRACED(waiter_.track->wait(waiter_.task, wait);) }
  MOK_DEVICE void fail(const Args& args, const Wait& wait) { waiter_.fail(args, wait); }
  MOK_DEVICE bool may_publish(Edge, int64, int32, Word, Word) { return true; }
  SeenRanks seen_inputs, seen_dones;

#if MOK_TRACE
  MOK_DEVICE void trace_to(cuda::Track& track) { waiter_.track = &track; }
  MOK_DEVICE void trace(TraceKind kind) { waiter_.track->end(kind, waiter_.task); }
#endif

 private:
  MOK_DEVICE static int32 first_row(uint32 rows) { return __ffs(static_cast<int>(rows)) - 1; }

  // What the leader has acquired its helpers see, and it releases what they wrote.
  MOK_DEVICE void copy_with_helpers(int32 count, int32 size, uint64 to, uint64 from) {
    help_->to[lane_idx()] = to;
    help_->from[lane_idx()] = from;
    if (is_leader()) {
      help_->num_rows = count;
      help_->num_bytes = size;
    }
    named_sync(kHelpBarrier, kHelpThreads);  // they begin
    named_sync(kHelpBarrier, kHelpThreads);  // they are done
  }

  // Chunk after chunk of the rows in `rows`: loads take longest, and get all chunks but one. (Three stores under way where
  // all memory is this GPU's: no difference.)
  MOK_DEVICE void copy(uint32 rows, int32 size, uint64 to, uint64 from) {
    if (rows == 0) return;
    if (is_leader()) fence_proxy_async();  // what others wrote, acquired by the leader, before copies of this proxy
    const uint32 chunks = smem_address(ring_.chunks[0]), full = smem_address(ring_.full);
    uint32 load_rows = rows;
    int32 load_offset = 0, store_offset = 0, in_flight = 0;
    while (rows != 0) {
      while (load_rows != 0 && in_flight < kCommChunks - 1) {
        const uint64 at = __shfl_sync(0xffffffffu, from, first_row(load_rows)) + load_offset;
        const uint32 num = static_cast<uint32>(min_of(kCommChunkBytes, size - load_offset));
        if (is_leader()) {
          mbarrier_expect_bytes(full + loaded_.slot * 8, num);
          bulk_load(chunks + loaded_.slot * kCommChunkBytes, reinterpret_cast<const void*>(at), num,
                    full + loaded_.slot * 8, evict_normal());
        }
        loaded_.advance();
        ++in_flight;
        if ((load_offset += kCommChunkBytes) >= size) load_offset = 0, load_rows &= load_rows - 1;
      }
      const uint64 at = __shfl_sync(0xffffffffu, to, first_row(rows)) + store_offset;
      const uint32 num = static_cast<uint32>(min_of(kCommChunkBytes, size - store_offset));
      mbarrier_wait(full + stored_.slot * 8, stored_.phase);
      if (is_leader()) {
        bulk_store(reinterpret_cast<void*>(at), chunks + stored_.slot * kCommChunkBytes, num, evict_normal());
        bulk_commit();
        bulk_wait_read<1>();  // the chunk before this one may be loaded again
      }
      stored_.advance();
      --in_flight;
      if ((store_offset += kCommChunkBytes) >= size) store_offset = 0, rows &= rows - 1;
    }
    if (is_leader()) bulk_wait_written();
    __syncwarp();
  }

  CommRing& ring_;
  Help* help_ = nullptr;
  const int32 num_workers_;
  Position<kCommChunks> loaded_, stored_;
  cuda::Waiter waiter_;
};

template <class S>
MOK_DEVICE bool communicate_tile(const Args& args, CommWorker& worker, const Task& task) {
  Signals<CommWorker> signals(args, worker);
  int32 is_ready = 0;
  if (worker.is_leader()) is_ready = S::needs(args, task, signals);
  if (!__shfl_sync(0xffffffffu, is_ready, 0)) return false;
  S::tile(args, worker, task);
  worker.sync();
  if (worker.is_leader()) {
    MOK_TRACED(worker.trace(TraceKind::work);)
    S::publishes(args, task, signals);
    MOK_TRACED(worker.trace(TraceKind::publish);)
  }
  return true;
}

// All communication tasks of a launch on one rank. `kGroup` 0: those of publish alone. Helpers stay for the first of the others.
template <Group kGroup>
MOK_DEVICE void run_communication(const Args& args, const Launch& launch, Tickets tickets, CommWorker& worker) {
  Tasks tasks(args, launch, Role::communication, tickets);
  worker.begin_call(args);
  // A task that waits for products must not keep consumers from them.
  if (kGroup != 0 && num_generations(args.call) > 1) worker.dismiss_helpers();
  for (bool is_running = true; is_running;) {
    Task task;
    int32 has_task = 0;
    if (worker.is_leader()) has_task = tasks.next(worker, &task);
    if (!__shfl_sync(0xffffffffu, has_task, 0)) break;
    task.stage = static_cast<Stage>(__shfl_sync(0xffffffffu, static_cast<int32>(task.stage), 0));
    task.block = __shfl_sync(0xffffffffu, task.block, 0);
    task.part = __shfl_sync(0xffffffffu, task.part, 0);
    worker.begin_task(task);
    if constexpr (kGroup == 0) {
      is_running = communicate_tile<Publish>(args, worker, task);
    } else if (holds(kGroup, Stage::dispatch) && task.stage == Stage::dispatch) {
      is_running = args.call.shape.is_push_dispatch ? communicate_tile<DispatchPush>(args, worker, task)
                                                    : communicate_tile<DispatchPull>(args, worker, task);
    } else if constexpr (holds(kGroup, Stage::combine)) {
      is_running = communicate_tile<CombinePull>(args, worker, task);  // a push is in down's stores
    }
    if (kGroup != 0) worker.dismiss_helpers();
  }
  if (kGroup != 0) worker.dismiss_helpers();
}

}  // namespace mok::sm90
