// The timeline of a worker of the CUDA targets: intervals that follow one another, each from the end of the one before.
//
// Compiled with MOK_TRACE=1 alone: then a kernel's last parameter says where records go. Without it whatever stands in
// MOK_TRACED is not even parsed, so the machine code is what it would be if it were not there (tests/compare_sass.py).
//
// One thread a worker writes its records. Its track lies in shared memory, since roles have no registers left. It takes room
// for kTraceChunk records at a time, so that a record waits for nothing but, every eighth time, an atomic. Time is
// %globaltimer, one clock for all SMs of a GPU. No wait and no signal depends on a record, and none orders anything.
#pragma once

#include "protocol/tasks.h"
#include "trace.h"

#if !defined(MOK_TRACE)
#define MOK_TRACE 0
#endif

#if MOK_TRACE
#define MOK_TRACED(...) __VA_ARGS__
#define MOK_TRACE_PARAMETER , const __grid_constant__ mok::cuda::TraceSink trace_sink

namespace mok::cuda {

// mok_modular/targets/cuda/trace.py packs it.
struct TraceSink {
  TraceRecord* records;
  Word* counts;        // records taken, and records for which there was no room
  int64 capacity;      // in records
  int64 first_launch;  // of the call at hand, counted over all calls of a trace
};

constexpr int kTraceChunk = 8;

// In shared memory, as its sink is. Everything is called by the one thread whose timeline it is.
class Track {
 public:
  MOK_DEVICE void open(const TraceSink& sink, int role, const Launch& launch) {
    sink_ = &sink;
    mark_ = now();
    next_ = end_ = 0;
    worker_ = static_cast<int32>(blockIdx.x) * kNumTraceRoles + role;
    launch_idx_ = static_cast<int32>(sink.first_launch) + launch.launch_idx;
    is_closed_ = 1;
  }
  MOK_DEVICE void begin_call(const Args& args) { rank_ = args.call.rank; }

  // The interval at hand ends now, or ended then, and was ...
  MOK_DEVICE void next_task(const Task& task, int64 end = now()) {
    add(end, TraceKind::wait, task, static_cast<int32>(Edge::tickets));
  }
  MOK_DEVICE void wait(const Task& task, const Wait& wait) {
    add(now(), TraceKind::wait, task, static_cast<int32>(wait.edge), wait.index, wait.peer);
    is_closed_ = 1;
  }
  MOK_DEVICE void give_up() { is_closed_ = 0; }  // comes before wait()
  MOK_DEVICE void wait(const Task& task, InnerWait edge, int64 end = now()) {
    add(end, TraceKind::wait, task, static_cast<int32>(edge));
  }
  MOK_DEVICE void end(TraceKind kind, const Task& task, int64 end = now()) { add(end, kind, task); }

  MOK_DEVICE static int64 now() { return static_cast<int64>(global_timer_ns()); }

 private:
  // Work and loads are kept however short they are, since tasks are counted by them.
  MOK_DEVICE void add(int64 end, TraceKind kind, const Task& task, int32 edge = -1, int64 index = 0, int32 peer = -1) {
    const int64 begin = mark_;
    if (kind == TraceKind::work || kind == TraceKind::load) end = max_of(end, begin + 1);
    if (end <= begin) return;
    mark_ = end;
    if (next_ == end_) {
      next_ = static_cast<uint32>(atomicAdd(sink_->counts, Word{kTraceChunk}));
      end_ = next_ + kTraceChunk;
    }
    const uint32 at = next_++;
    if (at >= sink_->capacity) {
      atomicAdd(sink_->counts + 1, Word{1});
      return;
    }
    sink_->records[at] = TraceRecord{begin,
                                     end,
                                     index,
                                     rank_,
                                     worker_,
                                     launch_idx_,
                                     static_cast<int32>(kind),
                                     static_cast<int32>(task.stage),
                                     task.block,
                                     task.part,
                                     edge,
                                     peer,
                                     is_closed_};
  }

  const TraceSink* sink_;
  int64 mark_;         // where the interval at hand begins
  uint32 next_, end_;  // records that are taken and not yet written
  int32 rank_, worker_, launch_idx_, is_closed_;
};

}  // namespace mok::cuda

#else
#define MOK_TRACED(...)
#define MOK_TRACE_PARAMETER
#endif
