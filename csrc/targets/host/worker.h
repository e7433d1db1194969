// A worker of the host target: one fiber or one thread that runs a role of a kernel.
//
// This is the whole interface between stage code and target (targets/README.md). Lanes of a
// CTA do not exist here: for_each is a loop and sync does nothing.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "stages/stage.h"
#include "trace.h"

namespace mok::host {

class Runtime;

struct StageStats {
  long long num_rows = 0, num_bytes = 0, num_flops = 0, busy_ns = 0, wait_ns = 0;
  void add(const StageStats& other) {
    num_rows += other.num_rows;
    num_bytes += other.num_bytes;
    num_flops += other.num_flops;
    busy_ns += other.busy_ns;
    wait_ns += other.wait_ns;
  }
};

// A wait for arrivals that has ended: the counter must hold just as many when the call is over.
struct CountedWait {
  Task task;
  Edge edge;
  int64 index;
  const Word* word;
  Word want;
  Word have() const { return load_relaxed(word); }
};

inline long long now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Worker {
 public:
  Worker(Runtime& runtime, int rank, int index, int num_workers, Role role)
      : runtime_(runtime), rank_(rank), index_(index), num_workers_(num_workers), role_(role) {}

  int rank() const { return rank_; }
  int index() const { return index_; }
  int num_workers() const { return num_workers_; }  // of this kernel on this rank
  Role role() const { return role_; }

  // ---- work ----
  template <class Index, class F>
  void for_each(Index count, F&& f) {
    for (Index i = 0; i < count; ++i) f(i);
  }
  template <class F>
  void once(F&& f) {
    f();
  }
  void sync() {}
  void add_relaxed(int32* cell, int32 value) { *cell += value; }
  // Rows whose source is null become zeros; those whose destination is null are left out.
  template <class Dst, class Src>
  void copy_rows(int32 count, int64 num_bytes, Dst&& dst, Src&& src, bool /*are_sources_read_again*/ = false) {
    for (int32 i = 0; i < count; ++i) {
      bf16* to = dst(i);
      if (!to) continue;
      const bf16* from = src(i);
      if (from)
        std::memcpy(to, from, static_cast<std::size_t>(num_bytes));
      else
        std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>(num_bytes));
    }
  }

  // ---- protocol ----
  Word draw(Word* counter);
  // negative: the call was aborted
  int64 next_ticket(const Args& args, Word* counter) {
    return is_aborted(args) ? -1 : static_cast<int64>(draw(counter));
  }
  void begin_wait(const Wait& wait);
  bool pause(const Args& args, const Wait& wait);  // false: give up
  void end_wait(const Wait& wait);
  void fail(const Args& args, const Wait& wait);  // the peer makes another call
  bool may_publish(Edge edge, int64 index, int32 dst_rank, Word value, Word total);
  // The launch has a function of the caller's in place of tiles. call_out runs it; false: it failed, and the call was
  // aborted.
  bool is_swapped() const { return is_swapped_; }
  bool call_out(const Args& args);
  // Python checks both: ids before the call, counts after it.
  void report_invalid_id(const Args&) {}
  void report_overflow(const Args&, int64 /*want*/) {}
  void report_abort(const Args&) {}  // the run's result says it

  // ---- trace ----
  void begin_task(const Task& task);
  const Task& task() const { return task_; }
  // Behind a tile and behind its signals; nothing where no trace is kept.
  void trace_work(const Cost& cost) {
    if (is_traced_) record_work(cost);
  }
  void trace_publish() {
    if (is_traced_) record_publish();
  }
  SeenRanks seen_inputs, seen_dones;  // of this call

  StageStats& stats(Stage stage) { return stats_[static_cast<int>(stage)]; }
  void count(Stage stage, const Cost& cost) {
    StageStats& s = stats(stage);
    s.num_rows += cost.num_rows;
    s.num_bytes += cost.num_bytes;
    s.num_flops += cost.num_flops;
  }

 private:
  friend class Runtime;
  friend class FiberRuntime;
  void record(TraceKind kind, const Wait* wait, bool is_closed);
  void record_work(const Cost& cost);
  void record_publish();

  Runtime& runtime_;
  int rank_, index_, num_workers_;
  Role role_;
  std::string kernel_;
  Task task_;
  long long wait_started_ns_ = 0;
  StageStats stats_[kNumStages];
  bool is_swapped_ = false, is_traced_ = false;
  int launch_idx_ = 0;
  long long steps_ = 0;      // logical time of a fiber
  long long last_mark_ = 0;  // where the interval at hand begins
  std::vector<TraceRecord> trace_;
  long long num_dropped_ = 0;
  unsigned long long waited_[kNumStages] = {}, published_[kNumStages] = {};  // bits of edges, by stage
  std::vector<CountedWait> counted_;
};

}  // namespace mok::host
