#include "targets/host/runtime.h"

#include "targets/host/gemm.h"

namespace mok::host {

GemmScratch& gemm_scratch() {
  thread_local GemmScratch scratch;
  return scratch;
}

// ---- Worker ---------------------------------------------------------------------------------

Word Worker::draw(Word* counter) {
  runtime_.yield(*this);
  return add_release(counter, 1);
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
  if (!wait.is_satisfied()) runtime_.record_wait(*this, wait);
}
void Worker::fail(const Args& args, const Wait& wait) {
  if (wait.is_satisfied()) runtime_.record_wait(*this, wait);  // else end_wait did
  runtime_.abort(Reason::mismatch, args);
}
bool Worker::may_publish(Edge edge, int64 index, int32 dst_rank) {
  return !runtime_.is_lost(edge, rank_, index, dst_rank);
}

// ---- Runtime --------------------------------------------------------------------------------

void Runtime::record_wait(const Worker& worker, const Wait& wait) {
  const std::lock_guard lock(mutex_);
  WaitRecord record;
  record.rank = worker.rank();
  record.worker = worker.index();
  record.stage = worker.task().stage;
  record.block = worker.task().block;
  record.part = worker.task().part;
  record.kernel = worker.kernel_;
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

bool Runtime::is_lost(Edge edge, int rank, long long index, int dst_rank) const {
  for (const Fault& fault : faults_)
    if (fault.edge == edge && fault.rank == rank && (fault.index < 0 || fault.index == index) &&
        (fault.dst_rank < 0 || fault.dst_rank == dst_rank))
      return true;
  return false;
}

Worker Runtime::make_worker(const LaunchSpec& spec, int rank, int index) {
  const Role role = spec.num_comm_workers == 0      ? Role::any
                    : index < spec.num_comm_workers ? Role::communication
                                                    : Role::compute;
  Worker worker(*this, rank, index, total_workers(spec), role);
  worker.kernel_ = spec.name;
  worker.task_.stage = spec.launch.stage;
  return worker;
}

void Runtime::run_worker(const LaunchSpec& spec, Worker& worker) {
  const Args args(programs_[static_cast<std::size_t>(worker.rank())].call);
  spec.kernel(args, spec.launch, worker);
  const std::lock_guard lock(mutex_);
  auto& kernels = result_.stats[static_cast<std::size_t>(worker.rank())];
  auto found = kernels.begin();
  while (found != kernels.end() && found->kernel != spec.name) ++found;
  if (found == kernels.end()) found = kernels.insert(found, KernelStats{spec.name, {}});
  for (int i = 0; i < kNumStages; ++i) found->stages[i].add(worker.stats_[i]);
}

}  // namespace mok::host
