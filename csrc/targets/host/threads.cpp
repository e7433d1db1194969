// The concurrent executor: every worker is an OS thread. It finds races that a fiber cannot have, and
// uses all cores. A wait ends by a timeout: when it has lasted for its limit and no worker of any rank has begun
// a task for as long, so that a long call is not taken for a stuck one.
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <thread>

#include "targets/host/runtime.h"

namespace mok::host {
namespace {

constexpr int kSpins = 64;  // polls before a waiter sleeps

class ThreadRuntime final : public Runtime {
 public:
  using Runtime::Runtime;

  void run() override {
    num_finished_.assign(programs_.size(), 0);
    std::vector<std::thread> streams;
    try {
      for (std::size_t rank = 0; rank < programs_.size(); ++rank)
        for (int stream = 0; stream < 2; ++stream)
          streams.emplace_back([this, rank, stream] { run_stream(rank, stream); });
    } catch (...) {  // no more threads
      give_up();
    }
    for (std::thread& stream : streams) stream.join();
    if (error_) std::rethrow_exception(error_);
  }

  void yield(Worker&) override { last_progress_ns_.store(now_ns(), std::memory_order_relaxed); }
  void park(Worker& worker, const Wait&) override { wait_clock(worker) = 0; }
  long long trace_now(const Worker&) const override { return now_ns(); }

  void call_out(const std::function<void()>& function) override { function(); }

  void hold(Worker& worker, double amount) override {
    // A rank that hangs where nobody waits for it still ends the call.
    const double limit_s = amount > 0 ? amount : options_.timeout_s > 0 ? 3 * options_.timeout_s : 1e9;
    const long long end = now_ns() + static_cast<long long>(limit_s * 1e9);
    while (now_ns() < end && !is_aborting_.load() && !is_interrupted_.load())
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (amount <= 0 && !is_aborting_.load())
      abort(Reason::timeout, Args(programs_[static_cast<std::size_t>(worker.rank())].call));
  }

  bool pause(Worker& worker, const Args& args, const Wait& wait) override {
    if (is_aborting_.load()) return false;
    if (is_interrupted_.load()) {
      abort(Reason::interrupted, args);
      return false;
    }
    // The first polls spin; then the clock starts.
    long long& clock = wait_clock(worker);
    if (clock > -kSpins && clock <= 0) {
      --clock;
      std::this_thread::yield();
      return true;
    }
    if (clock <= 0) clock = now_ns();
    if (now_ns() - std::max(clock, last_progress_ns_.load(std::memory_order_relaxed)) > limit_ns(wait)) {
      abort(Reason::timeout, args);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return true;
  }

 private:
  // Of the current wait: minus its polls so far, then when it began to count.
  static long long& wait_clock(Worker&) {
    thread_local long long clock = 0;  // a worker is a thread
    return clock;
  }
  // What only a late rank can delay may take start_timeout_s; the rest is this call's own progress.
  long long limit_ns(const Wait& wait) const {
    const bool is_start = is_start_edge(wait.edge);
    const double limit_s = is_start ? options_.start_timeout_s : options_.timeout_s;
    return limit_s > 0 ? static_cast<long long>(limit_s * 1e9) : (1ll << 62);
  }

  // For exceptions: ends all waits and starts no further kernel.
  void give_up() {
    const std::lock_guard lock(join_mutex_);
    error_ = std::current_exception();
    is_aborting_.store(true);
    joined_.notify_all();
  }

  void run_stream(std::size_t rank, int stream) {
    const auto& launches = programs_[rank].launches;
    for (std::size_t i = 0; i < launches.size(); ++i) {
      const LaunchSpec& spec = launches[i];
      if (spec.stream != stream) continue;
      if (spec.is_join) {
        std::unique_lock lock(join_mutex_);
        joined_.wait(lock, [&] { return num_finished_[rank] >= i || error_; });
        if (error_) return;
      }
      std::vector<std::thread> workers;
      try {
        for (int index = 0; index < total_workers(spec); ++index) {
          workers.emplace_back([this, &spec, rank, index] {
            try {
              Worker worker = make_worker(spec, static_cast<int>(rank), index);
              run_worker(spec, worker);
            } catch (...) {
              give_up();
            }
          });
        }
      } catch (...) {
        give_up();
      }
      for (std::thread& worker : workers) worker.join();
      const std::lock_guard lock(join_mutex_);
      ++num_finished_[rank];
      joined_.notify_all();
    }
  }

  std::mutex join_mutex_;
  std::condition_variable joined_;
  std::vector<std::size_t> num_finished_;  // launches, by rank
  std::exception_ptr error_;
  std::atomic<long long> last_progress_ns_{0};
};

}  // namespace

std::unique_ptr<Runtime> make_fiber_runtime(std::vector<RankProgram>&, const Options&, std::vector<Fault>);

std::unique_ptr<Runtime> make_runtime(std::vector<RankProgram>& programs, const Options& options,
                                      std::vector<Fault> faults) {
  if (options.use_threads) return std::make_unique<ThreadRuntime>(programs, options, std::move(faults));
  return make_fiber_runtime(programs, options, std::move(faults));
}

}  // namespace mok::host
