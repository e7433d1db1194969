// Communication inside a GEMM kernel: a warp that publishes, dispatches and pulls combine, beside the products.
//
// By default it is the spare warp of every CTA's first warp group: it costs no SM. It has few registers
// (Arch::kRoleRegisters), so rows pass through a small ring in shared memory and the copy engine moves them.
// With CTAs of its own (fwd_num_comm_sms) all four warps of such a CTA's first group do this, and the others leave.
#pragma once

#include "protocol/leave.h"
#include "stages/combine.h"
#include "stages/dispatch.h"
#include "stages/publish.h"
#include "targets/cuda/gemm/shared.h"
#include "targets/cuda/worker.h"

namespace mok::cuda::gemm {

constexpr uint32 kHelpBarrier =
    3;  // the named barrier of all consumers and the communicator; 1 and 2 are the consumers'

// The consumers, until they are dismissed. A call, since inlined it costs the products a register that they lack.
template <int kNumHelpers>
__noinline__ __device__ void help_communicator(const Help& help) {
  constexpr int32 kBatch = 8;
  const int32 warp = static_cast<int32>(threadIdx.x / 32) - kRoleThreads / 32, lane = static_cast<int32>(lane_idx());
  for (;;) {
    named_sync(kHelpBarrier, kNumHelpers + 32);
    const int32 num_rows = help.num_rows, num_words = help.num_bytes / 16;
    if (num_rows < 0) return;
    for (int32 row = warp; row < num_rows; row += kNumHelpers / 32) {
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
    named_sync(kHelpBarrier, kNumHelpers + 32);
  }
}

// The Worker of copy stages, as one warp. Lane 0 is the leader.
template <int kNumHelpers>
class CommWorker : public WaitingWorker<CommWorker<kNumHelpers>> {
 public:
  MOK_DEVICE CommWorker(CommRing& ring, int32 launch_idx, int32 num_workers)
      : WaitingWorker<CommWorker>(launch_idx), ring_(ring), num_workers_(num_workers) {
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
    named_sync(kHelpBarrier, kNumHelpers + 32);
    help_ = nullptr;
  }

  MOK_DEVICE int32 num_workers() const { return num_workers_; }
  MOK_DEVICE static bool is_leader() { return lane_idx() == 0; }

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
    // (Three stores under way where all memory is this GPU's: no difference.)
    pipe_.copy(
        smem_address(ring_.chunks[0]), smem_address(ring_.full), __ballot_sync(0xffffffffu, from != 0), size, to, from,
        [] { return evict_normal(); }, [] { return evict_normal(); });
    for (uint32 rows = cleared; rows != 0; rows &= rows - 1) {
      bf16x8* row = reinterpret_cast<bf16x8*>(__shfl_sync(0xffffffffu, to, __ffs(static_cast<int>(rows)) - 1));
      for (int32 i = lane; i < size / 16; i += 32) row[i] = bf16x8{};
    }
  }

 private:
  // What the leader has acquired its helpers see, and it releases what they wrote.
  MOK_DEVICE void copy_with_helpers(int32 count, int32 size, uint64 to, uint64 from) {
    help_->to[lane_idx()] = to;
    help_->from[lane_idx()] = from;
    if (is_leader()) {
      help_->num_rows = count;
      help_->num_bytes = size;
    }
    named_sync(kHelpBarrier, kNumHelpers + 32);  // they begin
    named_sync(kHelpBarrier, kNumHelpers + 32);  // they are done
  }

  CommRing& ring_;
  Help* help_ = nullptr;
  const int32 num_workers_;
  ChunkPipe<kCommChunks, kCommChunkBytes> pipe_;
};

template <class S, class CommWorker>
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
template <Group kGroup, class CommWorker>
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
      is_running = in_its_way(args.call.shape, Dispatch{},
                              [&](auto way) { return communicate_tile<decltype(way)>(args, worker, task); });
    } else if constexpr (holds(kGroup, Stage::combine)) {
      is_running = communicate_tile<CombinePull>(args, worker, task);  // a push is in down's stores
    }
    if (kGroup != 0) worker.dismiss_helpers();
  }
  if (kGroup != 0) worker.dismiss_helpers();
}

}  // namespace mok::cuda::gemm
