// The deterministic executor: every worker of every rank is a fiber of one OS thread.
#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <random>

#include "targets/host/runtime.h"

namespace mok::host {

constexpr std::size_t kStackBytes = 128 * 1024;

class FiberRuntime final : public Runtime {
 public:
  using Runtime::Runtime;

  void run() override {
    random_.seed(options_.seed);
    streams_.assign(programs_.size() * 2, Stream{0, options_.trace_begin});
    next_launch_.assign(programs_.size(), 0);
    running_.assign(programs_.size(), 0);
    for (std::size_t rank = 0; rank < programs_.size(); ++rank) start_launches(static_cast<int>(rank));
    while (!fibers_.empty()) {
      const std::size_t chosen = pick();
      if (chosen == fibers_.size()) {
        Fiber& stuck = *fibers_.front();
        abort(is_interrupted_.load() ? Reason::interrupted : Reason::deadlock,
              Args(programs_[static_cast<std::size_t>(stuck.worker.rank())].call));
        continue;
      }
      last_ = chosen;
      ++result_.num_switches;
      current_ = fibers_[chosen].get();
      current_->worker.steps_ = std::max(current_->worker.steps_, current_->ready);
      swapcontext(&scheduler_, &current_->context);
      if (request_) (*std::exchange(request_, nullptr))();
      now_ = current_->worker.steps_;
      if (current_->is_finished) retire(chosen);
    }
    if (error_) std::rethrow_exception(error_);
  }

  // Every draw and every wait, satisfied or not, lets the scheduler choose anew.
  void yield(Worker&) override { switch_out(nullptr); }
  void park(Worker&, const Wait& wait) override { switch_out(&wait); }
  bool pause(Worker&, const Args&, const Wait& wait) override {
    switch_out(&wait);
    return !is_aborting_.load();
  }
  long long trace_now(const Worker& worker) const override { return worker.steps_; }
  // On the scheduler's stack: a fiber's is too small for an interpreter.
  void call_out(const std::function<void()>& function) override {
    request_ = &function;
    switch_out(nullptr);
  }
  void hold(Worker& worker, double amount) override {
    static const Word kZero = 0;
    Wait never;
    never.word = &kZero;
    never.want = 1;
    if (amount <= 0) return switch_out(&never);
    for (double step = 0; step < amount; ++step) switch_out(nullptr);
    worker.steps_ += static_cast<long long>(amount);
  }

 private:
  struct Fiber {
    Fiber(const LaunchSpec& a_spec, Worker a_worker) : spec(a_spec), worker(std::move(a_worker)) {}
    const LaunchSpec& spec;
    Worker worker;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    const Wait* wait = nullptr;
    bool is_woken = false;  // its wait was seen to be over
    long long ready = 0;    // the step at which it can go on
    bool is_finished = false;
  };
  struct Stream {
    int num_alive = 0;  // workers of its current kernel
    long long end = 0;  // the step at which those before have left
  };

  void switch_out(const Wait* wait) {
    Fiber* self = current_;
    self->wait = wait;
    self->is_woken = false;
    self->ready = self->worker.steps_;
    swapcontext(&self->context, &scheduler_);
    self->wait = nullptr;
  }

  bool is_runnable(const Fiber& fiber) const { return !fiber.wait || is_aborting_.load() || fiber.wait->is_over(); }

  // As if workers ran side by side: whoever is behind in logical time goes on. A wait is over when its word was
  // published, which the fiber that ran last may just have done.
  std::size_t pick_by_time() {
    std::size_t chosen = fibers_.size();
    for (std::size_t i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = *fibers_[i];
      if (!is_runnable(fiber)) continue;
      if (fiber.wait && !fiber.is_woken) fiber.ready = std::max(fiber.ready, now_);
      fiber.is_woken = true;
      if (chosen == fibers_.size() || fiber.ready < fibers_[chosen]->ready) chosen = i;
    }
    return chosen;
  }

  // The index of the fiber that goes on; fibers_.size(): nobody can.
  std::size_t pick() {
    const std::size_t count = fibers_.size();
    if (is_interrupted_.load() && !is_aborting_.load()) return count;
    if (options_.is_traced && options_.order == Order::round_robin) return pick_by_time();
    if (options_.order == Order::random) {
      std::size_t num_runnable = 0, chosen = count;
      for (std::size_t i = 0; i < count; ++i)
        if (is_runnable(*fibers_[i]) && random_() % ++num_runnable == 0) chosen = i;
      return chosen;
    }
    for (std::size_t step = 0; step < count; ++step) {
      const std::size_t i = options_.order == Order::last_first ? count - 1 - step : (last_ + 1 + step) % count;
      if (is_runnable(*fibers_[i])) return i;
    }
    return count;
  }

  // Launches of a rank start in order: when their stream is free and, for a join, the other one too.
  void start_launches(int rank) {
    const auto r = static_cast<std::size_t>(rank);
    auto& launches = programs_[r].launches;
    while (next_launch_[r] < launches.size()) {
      const LaunchSpec& spec = launches[next_launch_[r]];
      Stream& stream = streams_[r * 2 + static_cast<std::size_t>(spec.stream)];
      if (stream.num_alive > 0 || (spec.is_join && running_[r] > 0)) return;
      ++next_launch_[r];
      const long long other_end = spec.is_join ? streams_[r * 2 + 1 - static_cast<std::size_t>(spec.stream)].end : 0;
      for (int index = 0; index < total_workers(spec); ++index)
        add_fiber(spec, make_worker(spec, rank, index), std::max(stream.end, other_end));
      stream.num_alive = total_workers(spec);
      running_[r] += stream.num_alive;
    }
  }

  void add_fiber(const LaunchSpec& spec, Worker worker, long long ready) {
    auto fiber = std::make_unique<Fiber>(spec, std::move(worker));
    fiber->ready = ready;
    if (free_stacks_.empty()) {
      fiber->stack.reset(new char[kStackBytes]);
    } else {
      fiber->stack = std::move(free_stacks_.back());
      free_stacks_.pop_back();
    }
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = kStackBytes;
    fiber->context.uc_link = &scheduler_;
    const auto self = reinterpret_cast<std::uintptr_t>(this);
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(&FiberRuntime::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self & 0xffffffffu));
    fibers_.push_back(std::move(fiber));
  }

  static void enter(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<FiberRuntime*>(static_cast<std::uintptr_t>(high) << 32 | low);
    Fiber* fiber = self->current_;
    try {
      self->run_worker(fiber->spec, fiber->worker);
    } catch (...) {  // allocation failures; must not cross a fiber's first frame
      self->error_ = std::current_exception();
      self->is_aborting_.store(true);
    }
    fiber->is_finished = true;
  }

  void retire(std::size_t i) {
    const int rank = fibers_[i]->worker.rank();
    const int stream = fibers_[i]->spec.stream;
    long long& end = streams_[static_cast<std::size_t>(rank * 2 + stream)].end;
    end = std::max(end, fibers_[i]->worker.steps_);
    free_stacks_.push_back(std::move(fibers_[i]->stack));
    fibers_.erase(fibers_.begin() + static_cast<std::ptrdiff_t>(i));
    if (last_ >= i) last_ = last_ == 0 ? fibers_.size() : last_ - 1;
    --running_[static_cast<std::size_t>(rank)];
    --streams_[static_cast<std::size_t>(rank * 2 + stream)].num_alive;
    start_launches(rank);
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;  // in order of creation
  std::vector<std::unique_ptr<char[]>> free_stacks_;
  std::vector<Stream> streams_;
  std::vector<std::size_t> next_launch_;
  std::vector<int> running_;
  std::size_t last_ = 0;
  long long now_ = 0;  // the step that the fiber which ran last has come to
  Fiber* current_ = nullptr;
  const std::function<void()>* request_ = nullptr;  // of the fiber that ran last
  ucontext_t scheduler_;
  std::mt19937_64 random_;
  std::exception_ptr error_;
};

std::unique_ptr<Runtime> make_fiber_runtime(std::vector<RankProgram>& programs, const Options& options,
                                            std::vector<Fault> faults) {
  return std::make_unique<FiberRuntime>(programs, options, std::move(faults));
}

}  // namespace mok::host
