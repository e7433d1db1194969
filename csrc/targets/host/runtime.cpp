#include "targets/host/runtime.h"

#include "targets/host/gemm.h"

namespace mok::host {
namespace {
struct StoodStill {};
}  // namespace

GemmScratch& gemm_scratch() {
  thread_local GemmScratch scratch;
  return scratch;
}

// ---- Worker ---------------------------------------------------------------------------------

Word Worker::draw(Word* counter) {
  runtime_.before_draw(*this);
  runtime_.yield(*this);
  if (observer) observer->draw(counter);
  const Word ticket = add_release(counter, 1);
  if (is_traced_) {
    Wait wait;
    wait.edge = Edge::tickets;
    wait.index = static_cast<int64>(ticket);
    record(TraceKind::wait, &wait, true);
  }
  return ticket;
}
void Worker::begin_task(const Task& task) {
  task_ = task;
  runtime_.before_task(*this);
}
void Worker::begin_wait(const Wait& wait) {
  wait_started_ns_ = now_ns();
  runtime_.park(*this, wait);
}
bool Worker::pause(const Args& args, const Wait& wait) {
  return runtime_.pause(*this, args, wait) && !is_aborted(args);
}
void Worker::end_wait(const Wait& wait) {
  stats(task_.stage).wait_ns += now_ns() - wait_started_ns_;
  const bool is_satisfied = wait.is_satisfied();
  if (!is_satisfied) runtime_.record_wait(*this, wait);
  if (observer && is_satisfied) observer->satisfied(wait);
  if (is_satisfied && !is_cross_rank(wait.edge))
    counted_.push_back(CountedWait{task_, wait.edge, wait.index, wait.word, wait.want});
  if (!is_traced_) return;
  record(TraceKind::wait, &wait, is_satisfied);
  waited_[static_cast<int>(task_.stage)] |= 1ull << static_cast<int>(wait.edge);
}
void Worker::fail(const Args& args, const Wait& wait) {
  if (wait.is_satisfied()) runtime_.record_wait(*this, wait);  // else end_wait did
  runtime_.abort(Reason::mismatch, args);
}
bool Worker::may_publish(Edge edge, int64 index, int32 dst_rank, Word /*value*/, Word /*total*/) {
  if (is_traced_) published_[static_cast<int>(task_.stage)] |= 1ull << static_cast<int>(edge);
  return runtime_.may_publish(*this, edge, index, dst_rank);
}

bool Worker::call_out(const Args& args) { return runtime_.run_swapped_stage(*this, args); }

void Worker::record(TraceKind kind, const Wait* wait, bool is_closed) {
  const long long end = runtime_.trace_now(*this), begin = last_mark_;
  last_mark_ = end;
  if (end <= begin) return;
  if (static_cast<long long>(trace_.size()) >= runtime_.options().trace_capacity) {
    ++num_dropped_;
    return;
  }
  trace_.push_back(TraceRecord{begin, end, wait ? wait->index : 0, rank_, index_, launch_idx_, static_cast<int32>(kind),
                               static_cast<int32>(task_.stage), task_.block, task_.part,
                               wait ? static_cast<int32>(wait->edge) : -1, wait ? wait->peer : -1, is_closed});
}
// Logical time: 1 KiB moved or 2^18 floating-point operations a step, whichever takes longer, and one at least.
void Worker::record_work(const Cost& cost) {
  steps_ += max_of(int64{1}, max_of(cost.num_bytes >> 10, cost.num_flops >> 18));
  record(TraceKind::work, nullptr, true);
}
void Worker::record_publish() {
  steps_ += 1;
  record(TraceKind::publish, nullptr, true);
}

// ---- Runtime --------------------------------------------------------------------------------

WaitRecord Runtime::record_of(const Worker& worker) {
  WaitRecord record;
  record.rank = worker.rank();
  record.worker = worker.index();
  record.stage = worker.task().stage;
  record.block = worker.task().block;
  record.part = worker.task().part;
  record.kernel = worker.kernel_;
  return record;
}

void Runtime::record_wait(const Worker& worker, const Wait& wait) {
  const std::lock_guard lock(mutex_);
  WaitRecord record = record_of(worker);
  record.edge = wait.edge;
  record.index = wait.index;
  record.peer = wait.peer;
  record.have = wait.kind == WaitKind::entered ? load_relaxed(wait.word) >> kEnteredBits : load_relaxed(wait.word);
  record.want = wait.want;
  result_.waits.push_back(std::move(record));
}

void Runtime::abort(Reason reason, const Args& args) {
  {
    const std::lock_guard lock(mutex_);
    if (result_.reason == Reason::none) result_.reason = reason;
  }
  raise_abort(args);
  is_aborting_.store(true);
}

bool Runtime::may_publish(Worker& worker, Edge edge, long long index, int dst_rank) {
  if (faults_.is_empty()) return true;
  const Faults::Publish fault = faults_.at_publish(edge, worker.rank(), index, dst_rank);
  if (fault.delay > 0) hold(worker, fault.delay);
  if (fault.delay > 0 && is_aborting_.load()) return false;  // too late
  if (fault.surplus != 0 && !is_cross_rank(edge))
    add_release(Args(programs_[static_cast<std::size_t>(worker.rank())].call).counter(edge, index),
                static_cast<Word>(fault.surplus));
  return !fault.is_lost;
}
void Runtime::before_draw(Worker& worker) {
  if (!faults_.is_empty() && faults_.is_stopped(worker.rank())) stand_still(worker, 0);
}
void Runtime::before_task(Worker& worker) {
  if (faults_.is_empty()) return;
  if (const Fault* fault = faults_.stall(worker.task(), worker.rank())) stand_still(worker, fault->amount);
}
void Runtime::stand_still(Worker& worker, double amount) {
  hold(worker, amount);
  if (amount > 0) return;
  const std::lock_guard lock(mutex_);
  result_.held.push_back(record_of(worker));
  throw StoodStill();
}

// Nobody waits for an arrival too many, so it is looked for when all is over: the most that anybody has waited for is,
// in every plan, all that ever comes.
void Runtime::find_surplus() {
  if (result_.reason != Reason::none) return;
  for (const auto& [word, counted] : counted_) {
    const auto& [rank, wait] = counted;
    const Word have = wait.have();
    if (have == wait.want || (have >= kPlenty && have < 2 * kPlenty)) continue;
    result_.reason = Reason::surplus;
    WaitRecord record;
    record.rank = rank;
    record.stage = wait.task.stage;
    record.block = wait.task.block;
    record.part = wait.task.part;
    record.edge = wait.edge;
    record.index = wait.index;
    record.have = have;
    record.want = wait.want;
    result_.waits.push_back(std::move(record));
  }
}

Result Runtime::take_result() {
  find_surplus();
  result_.trace_end = options_.trace_begin;
  for (const TraceRecord& record : result_.trace) result_.trace_end = max_of<long long>(result_.trace_end, record.end);
  return std::move(result_);
}

bool Runtime::run_swapped_stage(const Worker& worker, const Args& args) {
  const auto& launches = programs_[static_cast<std::size_t>(worker.rank())].launches;
  const LaunchSpec& spec = launches[static_cast<std::size_t>(worker.launch_idx_)];
  bool is_ok = false;
  call_out([&] { is_ok = spec.swapped(); });
  if (!is_ok) abort(Reason::swapped, args);
  return is_ok;
}

Worker Runtime::make_worker(const LaunchSpec& spec, int rank, int index) {
  const Role role = spec.num_comm_workers == 0      ? Role::any
                    : index < spec.num_comm_workers ? Role::communication
                                                    : Role::compute;
  Worker worker(*this, rank, index, total_workers(spec), role);
  worker.kernel_ = spec.name;
  worker.task_.stage = spec.launch.stage;
  worker.is_swapped_ = spec.swapped != nullptr;
  worker.is_traced_ = options_.is_traced;
  worker.launch_idx_ = spec.launch.launch_idx;
  worker.steps_ = options_.trace_begin;
  return worker;
}

void Runtime::run_worker(const LaunchSpec& spec, Worker& worker) {
  const Args args(programs_[static_cast<std::size_t>(worker.rank())].call);
  if (worker.is_traced_) worker.last_mark_ = trace_now(worker);  // an interval begins where the one before ends
  try {
    spec.kernel(args, spec.launch, worker);
  } catch (const StoodStill&) {  // it does nothing more, not even what tiles in flight do after an abort
  }
  const std::lock_guard lock(mutex_);
  auto& kernels = result_.stats[static_cast<std::size_t>(worker.rank())];
  auto found = kernels.begin();
  while (found != kernels.end() && found->kernel != spec.name) ++found;
  if (found == kernels.end()) found = kernels.insert(found, KernelStats{spec.name, {}});
  for (int i = 0; i < kNumStages; ++i) found->stages[i].add(worker.stats_[i]);
  for (const CountedWait& wait : worker.counted_) {
    const auto found = counted_.try_emplace(wait.word, worker.rank(), wait).first;
    if (wait.want > found->second.second.want) found->second.second = wait;
  }
  result_.trace.insert(result_.trace.end(), worker.trace_.begin(), worker.trace_.end());
  result_.num_dropped += worker.num_dropped_;
  for (int i = 0; i < kNumStages; ++i) {
    result_.waited[i] |= worker.waited_[i];
    result_.published[i] |= worker.published_[i];
  }
}

}  // namespace mok::host
