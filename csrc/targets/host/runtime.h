// Runs the kernels of all ranks of a group in one process, on fibers or on threads.
//
// Fibers: one OS thread, and a deterministic scheduler decides who goes on at every wait and every
// draw of a ticket. When no fiber can go on, that is a deadlock: a fact, reported with the table of
// all waits, not a hang. Threads: real concurrency, and waits end by a timeout.
// Not promised on either: memory order of a GPU, speed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "targets/host/faults.h"
#include "targets/host/worker.h"

namespace mok::host {

// What counters hold where waits are satisfied beforehand: above every count of arrivals.
constexpr Word kPlenty = Word{1} << 40;

using Kernel = void (*)(const Args& args, const Launch& launch, Worker& worker);

struct LaunchSpec {
  std::string name;
  Launch launch;
  Kernel kernel = nullptr;
  int stream = 0;        // 0: communication, 1: compute
  bool is_join = false;  // starts after everything launched before it, on both streams
  int num_workers = 1;   // compute workers, or all of them where roles do not matter
  int num_comm_workers = 0;
  std::function<bool()> swapped;  // what does the work of a swapped stage
};

struct RankProgram {
  Call call;
  std::vector<LaunchSpec> launches;
};

enum class Order { round_robin, random, last_first };

struct Options {
  Order order = Order::round_robin;
  unsigned long long seed = 0;
  bool use_threads = false;
  double timeout_s = 10.0, start_timeout_s = 300.0;  // threads only; 0: for ever
  bool is_traced = false;
  long long trace_begin = 0;           // steps of the calls before
  long long trace_capacity = 1 << 16;  // records a worker
};

enum class Reason { none, deadlock, timeout, mismatch, interrupted, surplus, swapped };

// One row of the table of waits.
struct WaitRecord {
  int rank = 0, worker = 0;
  Stage stage = Stage::publish;
  int block = 0, part = 0;
  std::string kernel;
  Edge edge = Edge::entered;
  long long index = 0;
  int peer = -1;
  Word have = 0, want = 0;
};

struct KernelStats {
  std::string kernel;
  StageStats stages[kNumStages];
};

struct Result {
  Reason reason = Reason::none;
  std::vector<WaitRecord> waits;                // the first is the one that gave up
  std::vector<WaitRecord> held;                 // workers that stood still without a wait
  std::vector<std::vector<KernelStats>> stats;  // by rank
  long long num_switches = 0;
  std::vector<TraceRecord> trace;
  long long num_dropped = 0;                                               // records
  long long trace_end = 0;                                                 // steps
  unsigned long long waited[kNumStages] = {}, published[kNumStages] = {};  // bits of edges, by stage; traced runs
};

class Runtime {
 public:
  Runtime(std::vector<RankProgram>& programs, const Options& options, std::vector<Fault> faults)
      : programs_(programs), options_(options), faults_(std::move(faults)) {
    result_.stats.resize(programs.size());
  }
  virtual ~Runtime() = default;
  virtual void run() = 0;
  Result take_result();
  void interrupt() { is_interrupted_.store(true); }

  // Called by workers.
  virtual void yield(Worker& worker) = 0;
  virtual bool pause(Worker& worker, const Args& args, const Wait& wait) = 0;
  virtual void park(Worker& worker, const Wait& wait) = 0;
  virtual long long trace_now(const Worker& worker) const = 0;
  void record_wait(const Worker& worker, const Wait& wait);
  void abort(Reason reason, const Args& args);
  // Planted faults; true, and nothing done, where there are none.
  bool may_publish(Worker& worker, Edge edge, long long index, int dst_rank);
  // Runs a function that needs a whole stack.
  virtual void call_out(const std::function<void()>& function) = 0;
  bool run_swapped_stage(const Worker& worker, const Args& args);
  void before_draw(Worker& worker);
  void before_task(Worker& worker);
  const Options& options() const { return options_; }

 protected:
  // Suspends the worker for so many steps (fibers) or seconds (threads); 0: until the call is aborted.
  virtual void hold(Worker& worker, double amount) = 0;
  void stand_still(Worker& worker, double amount);
  static WaitRecord record_of(const Worker& worker);
  void find_surplus();
  void run_worker(const LaunchSpec& spec, Worker& worker);
  Worker make_worker(const LaunchSpec& spec, int rank, int index);
  static int total_workers(const LaunchSpec& spec) { return spec.num_workers + spec.num_comm_workers; }

  std::vector<RankProgram>& programs_;
  Options options_;
  Faults faults_;
  std::mutex mutex_;
  Result result_;
  std::unordered_map<const Word*, std::pair<int, CountedWait>> counted_;  // with the rank
  std::atomic<bool> is_aborting_{false}, is_interrupted_{false};
};

// The runtime that `options` ask for.
std::unique_ptr<Runtime> make_runtime(std::vector<RankProgram>& programs, const Options& options,
                                      std::vector<Fault> faults);

}  // namespace mok::host
