// A worker of the CUDA targets: one CTA that runs tasks of copy and element stages.
//
// One thread (the leader) draws tickets, waits and publishes; all threads share a tile. What the others
// wrote before sync() is covered by the leader's release after it.
#pragma once

#include "stages/stage.h"
#include "targets/cuda/chunk_pipe.h"
#include "targets/cuda/timeline.h"

namespace mok::cuda {

// Several small CTAs an SM: while one waits for its next ticket the others copy.
#if !defined(MOK_CTA_WARPS)
#define MOK_CTA_WARPS 8
#endif
constexpr int kWarps = MOK_CTA_WARPS, kCtasPerSm = 24 / kWarps;
constexpr int kThreads = 32 * kWarps;
constexpr int kPollNs = 64;

// Where rows pass through on their way, in kernels that copy: every warp has a ring of chunks of its own.
constexpr int kChunkBytes = 2048, kChunks = 4;
struct alignas(128) CopyRing {
  unsigned char chunks[kWarps][kChunks][kChunkBytes];
  uint64 full[kWarps][kChunks];
};
#if defined(MOK_COPY_RING_BYTES)
static_assert(sizeof(CopyRing) <= MOK_COPY_RING_BYTES, "mok_modular/targets/cuda/device.py asks for this much");
#endif

// Bounded waits: what a poll must know beyond the word. Used by every kind of worker.
struct Waiter {
  Word clock_ns = 0;  // since when the wait counts; lowest bit: whether it does. One word for want of registers
  Task task;
  int32 launch_idx = 0;
  MOK_TRACED(Track* track = nullptr;)

  __device__ void begin() { clock_ns = 0; }

  // false: the wait has expired, and every rank was told, or the call was ended elsewhere.
  __device__ bool pause(const Args& args, const Wait& wait) {
    const bool is_ended = is_aborted(args);
    const Word now = global_timer_ns() | 1;
    const bool is_start = is_start_edge(wait.edge) || (wait.edge == Edge::done && task.stage == Stage::publish);
    const Word limit = is_start ? args.call.start_timeout_ns : args.call.timeout_ns;
    // One late rank stalls every inner edge of the others: the inner clock starts when all are seen to have come,
    // which is looked at eight times a timeout, so that an error is late by no more than that.
    if (clock_ns == 0 || (!(clock_ns & 1) && limit != 0 && now - clock_ns >= limit / 8))
      clock_ns = is_start || all_have_come(args) ? now : now - 1;
    if (!is_ended && (limit == 0 || !(clock_ns & 1) || now - clock_ns < limit)) {
      __nanosleep(kPollNs);
      return true;
    }
    record(args, wait, is_ended ? kFailureAborted : kFailureTimeout);
    if (!is_ended) raise_abort(args);
    MOK_TRACED(track->give_up();)
    return false;
  }

  __device__ void fail(const Args& args, const Wait& wait) {
    record(args, wait, kFailureMismatch);
    raise_abort(args);
  }

 private:
  // The first failure of a rank stays.
  __device__ void record(const Args& args, const Wait& wait, FailureReason reason) {
    Failure* failure = args.call.failure;
    if (atomicCAS_system(&failure->is_set, Word{0}, Word{1}) != 0) return;
    failure->reason = reason;
    failure->rank = args.call.rank;
    failure->stage = static_cast<int32>(task.stage);
    failure->block = task.block;
    failure->part = task.part;
    failure->edge = static_cast<int32>(wait.edge);
    failure->peer = wait.peer;
    failure->launch_idx = launch_idx;
    failure->index = wait.index;
    const bool is_mismatch = reason == kFailureMismatch;  // then the entered words say what each rank does
    failure->have = load_relaxed(is_mismatch ? wait.peer_entered : wait.word);
    failure->want = is_mismatch ? wait.own_entered : wait.want;
    failure->raised_by = abort_raiser(args);
    fence_system();
    store_system(&failure->is_set, 2);  // complete
  }
};

// What all kinds of workers have: tickets, waits and signals, by the one thread that is their leader (Self::is_leader).
template <class Self>
class WaitingWorker {
 public:
  __device__ WaitingWorker(int32 launch_idx) { waiter_.launch_idx = launch_idx; }

  __device__ void begin_call([[maybe_unused]] const Args& args) {
    seen_inputs = seen_dones = SeenRanks{};
    MOK_TRACED(if (Self::is_leader()) waiter_.track->begin_call(args);)
  }
  __device__ void begin_task(const Task& task) {
    waiter_.task = task;
    MOK_TRACED(if (Self::is_leader()) waiter_.track->next_task(task);)
  }
  __device__ Word draw(Word* counter) { return atomicAdd(counter, Word{1}); }
  __device__ void begin_wait(const Wait&) { waiter_.begin(); }
  __device__ bool pause(const Args& args, const Wait& wait) { return waiter_.pause(args, wait); }
  __device__ void end_wait([[maybe_unused]] const Wait& wait) { MOK_TRACED(waiter_.track->wait(waiter_.task, wait);) }
  __device__ void fail(const Args& args, const Wait& wait) { waiter_.fail(args, wait); }
  __device__ bool may_publish(Edge, int64, int32, Word, Word) { return true; }
  SeenRanks seen_inputs, seen_dones;  // of this call

#if MOK_TRACE
  __device__ void trace_to(Track& track) { waiter_.track = &track; }
  // The leader has come to the end of its tile, or of its signals.
  __device__ void trace(TraceKind kind) { waiter_.track->end(kind, waiter_.task); }
#endif

 protected:
  Waiter waiter_;
};

// The ring of a CTA, in dynamic shared memory, its barriers ready.
__device__ __forceinline__ CopyRing* open_ring() {
  extern __shared__ __align__(128) unsigned char mok_ring[];
  CopyRing* ring = reinterpret_cast<CopyRing*>(mok_ring);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWarps * kChunks; ++i) mbarrier_init(smem_address(&ring->full[0][0] + i), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  return ring;
}

class Worker : public WaitingWorker<Worker> {
 public:
  // `scratch`: four words of shared memory for broadcasts.
  __device__ Worker(int* scratch, int32 launch_idx, CopyRing* ring = nullptr)
      : WaitingWorker(launch_idx), scratch_(scratch), ring_(ring) {}

  __device__ int32 index() const { return blockIdx.x; }
  __device__ int32 num_workers() const { return gridDim.x; }
  __device__ Role role() const { return Role::any; }
  __device__ static bool is_leader() { return threadIdx.x == 0; }

  // ---- work ----
  template <class Index, class F>
  __device__ void for_each(Index count, F&& f) {
    for (Index i = threadIdx.x; i < count; i += kThreads) f(i);
  }
  template <class F>
  __device__ void once(F&& f) {
    if (is_leader()) f();
  }
  __device__ void sync() { __syncthreads(); }
  __device__ void add_relaxed(int32* cell, int32 value) { atomicAdd(cell, value); }

  // Rows are dealt to warps; the copy engine moves them in chunks through the warp's ring, kChunks - 1 loads in flight.
  // Behind sync() all rows are written, and covered by the leader's release.
  template <class Dst, class Src>
  __device__ void copy_rows(int32 count, int64 num_bytes, Dst&& dst, Src&& src, bool are_sources_read_again = false) {
    const int32 warp = static_cast<int32>(threadIdx.x) / 32, lane = static_cast<int32>(lane_idx());
    const int32 num_rows = (count - warp + kWarps - 1) / kWarps;  // of this warp: lane i finds out where row i goes
    unsigned long long to = 0, from = 0;
    if (lane < num_rows) {
      to = reinterpret_cast<unsigned long long>(dst(warp + lane * kWarps));
      if (to) from = reinterpret_cast<unsigned long long>(src(warp + lane * kWarps));
    }
    const uint32 copied = __ballot_sync(0xffffffffu, from != 0),
                 cleared = __ballot_sync(0xffffffffu, to != 0 && from == 0);
    const int32 size = static_cast<int32>(num_bytes);
    for (uint32 rows = cleared; rows != 0; rows &= rows - 1) {
      bf16x8* row = reinterpret_cast<bf16x8*>(__shfl_sync(0xffffffffu, to, __ffs(static_cast<int>(rows)) - 1));
      for (int32 i = lane; i < size / 16; i += 32) row[i] = bf16x8{};
    }
    // Sources that others read soon stay in the L2, and what is written, far more than the L2 holds, goes first.
    pipe_.copy(
        smem_address(ring_->chunks[warp]), smem_address(ring_->full[warp]), copied, size, to, from,
        [&] { return are_sources_read_again ? evict_last() : evict_first(); }, [] { return evict_first(); });
  }

  // ---- protocol: called by the leader, beside what WaitingWorker has ----
  // Nobody waits for the host here, so it learns of both at its next call.
  __device__ void report_invalid_id(const Args& args) { atomicAdd_system(&args.call.failure->num_invalid_ids, 1); }
  __device__ void report_overflow(const Args& args, int64 want) {
    Failure* failure = args.call.failure;
    if (atomicCAS_system(&failure->is_set, Word{0}, Word{1}) != 0) return;
    failure->reason = kFailureCapacity;
    failure->rank = args.call.rank;
    failure->have = static_cast<Word>(args.call.shape.capacity_rows);
    failure->want = static_cast<Word>(want);
    fence_system();
    store_system(&failure->is_set, 2);
    raise_abort(args);  // rows that this rank does not take are missing elsewhere
  }
  // The call was ended and no wait was open here.
  __device__ void report_abort(const Args& args) {
    Failure* failure = args.call.failure;
    if (atomicCAS_system(&failure->is_set, Word{0}, Word{1}) != 0) return;
    failure->reason = kFailureAborted;
    failure->rank = args.call.rank;
    failure->edge = failure->peer = -1;
    failure->raised_by = abort_raiser(args);
    fence_system();
    store_system(&failure->is_set, 2);
  }

#if MOK_TRACE
  __device__ void open_track(const TraceSink& sink, const Launch& launch) {
    __shared__ Track track;
    __shared__ TraceSink own_sink;
    waiter_.track = &track;
    if (!is_leader()) return;
    own_sink = sink;
    track.open(own_sink, static_cast<int>(TraceRole::cta), launch);
  }
#endif

  // A ticket of the leader's for all threads; negative: the call was aborted.
  __device__ int64 next_ticket(const Args& args, Word* counter) {
    return broadcast(is_leader() && !is_aborted(args) ? static_cast<int32>(draw(counter)) : -1);
  }
  // The leader's value, for all threads.
  __device__ int32 broadcast(int32 value) {
    if (is_leader()) scratch_[0] = value;
    __syncthreads();
    const int32 result = scratch_[0];
    __syncthreads();
    return result;
  }
  __device__ bool broadcast_task(bool has_task, const Task& drawn, Task* task) {
    if (is_leader()) {
      scratch_[0] = has_task;
      scratch_[1] = static_cast<int32>(drawn.stage);
      scratch_[2] = drawn.block;
      scratch_[3] = drawn.part;
    }
    __syncthreads();
    const bool result = scratch_[0];
    *task = Task{static_cast<Stage>(scratch_[1]), scratch_[2], scratch_[3], 0, 0};
    __syncthreads();
    return result;
  }

 private:
  int* scratch_;
  CopyRing* ring_;
  ChunkPipe<kChunks, kChunkBytes> pipe_;
};

}  // namespace mok::cuda
