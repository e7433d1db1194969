// A worker of the CUDA targets: one CTA that runs tasks of copy and element stages.
//
// One thread (the leader) draws tickets, waits and publishes; all threads share a tile. What the others
// wrote before sync() is covered by the leader's release after it.
#pragma once

#include "stages/stage.h"

namespace mok::cuda {

// Several small CTAs an SM: while one waits for its next ticket the others copy.
constexpr int kThreads = 256, kCtasPerSm = 3;
constexpr int kWarps = kThreads / 32;
constexpr int kPollNs = 64;

// Bounded waits: what a poll must know beyond the word. Used by every kind of worker.
struct Waiter {
  Word clock_ns = 0;  // since when the wait counts; lowest bit: whether it does. One word for want of registers
  Task task;
  int32 launch_idx = 0;

  __device__ void begin() { clock_ns = 0; }

  // false: the wait has expired, and every rank was told, or the call was ended elsewhere.
  __device__ bool pause(const Args& args, const Wait& wait) {
    const bool is_ended = is_aborted(args);
    const Word now = global_timer_ns() | 1;
    const bool is_start = wait.edge == Edge::input_ready || wait.edge == Edge::topk_ready ||
                          wait.edge == Edge::entered || (wait.edge == Edge::done && task.stage == Stage::publish);
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

class Worker {
 public:
  // `scratch`: four words of shared memory for broadcasts.
  __device__ Worker(int* scratch, int32 launch_idx) : scratch_(scratch) { waiter_.launch_idx = launch_idx; }

  __device__ int32 index() const { return blockIdx.x; }
  __device__ int32 num_workers() const { return gridDim.x; }
  __device__ Role role() const { return Role::any; }
  __device__ bool is_leader() const { return threadIdx.x == 0; }

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

  // A warp a row, 16 bytes a lane, eight loads in flight. Addresses and sizes are multiples of 16 bytes.
  template <class Dst, class Src>
  __device__ void copy_rows(int32 count, int64 num_bytes, Dst&& dst, Src&& src) {
    const int32 num_words = static_cast<int32>(num_bytes / 16);
    for (int32 row = threadIdx.x / 32; row < count; row += kWarps) {
      bf16x8* to = reinterpret_cast<bf16x8*>(dst(row));
      if (!to) continue;
      const bf16x8* from = reinterpret_cast<const bf16x8*>(src(row));
      copy_words(to, from, num_words);
    }
  }

  // ---- protocol: called by the leader ----
  __device__ Word draw(Word* counter) { return atomicAdd(counter, Word{1}); }
  __device__ void begin_wait(const Wait&) { waiter_.begin(); }
  __device__ bool pause(const Args& args, const Wait& wait) { return waiter_.pause(args, wait); }
  __device__ void end_wait(const Wait&) {}
  __device__ void fail(const Args& args, const Wait& wait) { waiter_.fail(args, wait); }
  __device__ bool may_publish(Edge, int64, int32) { return true; }
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

  SeenRanks seen_inputs, seen_dones;  // of this call

  __device__ void begin_task(const Task& task) { waiter_.task = task; }

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
  __device__ static void copy_words(bf16x8* to, const bf16x8* from, int32 num_words) {
    constexpr int kInFlight = 8;
    for (int32 first = threadIdx.x % 32; first < num_words; first += 32 * kInFlight) {
      bf16x8 words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        words[i] = bf16x8{};
        if (from && first + 32 * i < num_words) words[i] = from[first + 32 * i];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + 32 * i < num_words) to[first + 32 * i] = words[i];
    }
  }

  int* scratch_;
  Waiter waiter_;
};

}  // namespace mok::cuda
