#include "targets/host/swapped.h"

#include "targets/driver.h"

namespace mok::host {
namespace {

// A swapped wgrad keeps its carries itself: none takes another's place. The wait for that would be for the same kernel.
struct SwappedWgrad : Wgrad {
  template <class W>
  static bool needs(const Args& args, const Task& task, Signals<W>& signals) {
    return needs_operands(args, task, signals);
  }
};

// A swapped dispatch reads every row from its source. A row that is copied inside the rank (pull once) would be waited for
// in the same kernel.
struct SwappedDispatch : DispatchPull {
  template <class W>
  static bool needs(const Args& args, const Task& task, Signals<W>& signals) {
    return wait_slot_free(args.call, task.block, signals) && wait_row_sources(args.call, task, signals);
  }
};

// All waits of the launch, the function once, all signals: as a kernel of its own does that is launched when the
// kernels before it have ended. A task waits only for kernels before it and for other ranks, so this is no deadlock.
// One worker; false: the call is over.
template <class S>
bool run_swapped(const Args& args, const Launch& launch, Worker& worker) {
  Signals<Worker> signals(args, worker);
  Tasks tasks(args, launch, worker.role());
  std::vector<Task> drawn;
  Task task;
  while (tasks.next(worker, &task)) {
    worker.begin_task(task);
    if (!S::needs(args, task, signals)) return false;
    drawn.push_back(task);
  }
  if (drawn.empty() || is_aborted(args)) return !is_aborted(args);
  const long long begin = now_ns();
  if (!worker.call_out(args)) return false;
  worker.stats(S::kStage).busy_ns += now_ns() - begin;
  Cost total;
  for (const Task& each : drawn) {
    const Cost cost = S::cost(args.call, each);
    worker.count(S::kStage, cost);
    total.num_bytes += cost.num_bytes;
    total.num_flops += cost.num_flops;
  }
  worker.trace_work(total);
  for (const Task& each : drawn) S::publishes(args, each, signals);
  worker.trace_publish();
  return true;
}

template <class S>
void windowed(const Args& args, const Launch& launch, Worker& worker) {
  run_swapped<S>(args, launch, worker);
  leave_last_group(args, launch, worker);
}

void reduce(const Args& args, const Launch& launch, Worker& worker) {
  run_swapped<Reduce>(args, launch, worker);
  if (is_aborted(args)) Reduce::poison(args.call, worker);
  leave_call(args, Edge::exited, launch, worker);
}

}  // namespace

Kernel find_swapped_kernel(Stage stage) {
  switch (stage) {
    case Stage::dispatch:
      return windowed<SwappedDispatch>;
    case Stage::gate_up:
      return windowed<GateUp>;
    case Stage::swiglu:
      return windowed<Swiglu>;
    case Stage::down:
      return windowed<Down>;
    case Stage::combine:
      return windowed<CombinePush>;
    case Stage::reverse_combine:
      return windowed<ReverseCombine>;
    case Stage::down_dgrad:
      return windowed<DownDgrad>;
    case Stage::swiglu_backward:
      return windowed<SwigluBackward>;
    case Stage::gate_up_dgrad:
      return windowed<GateUpDgrad>;
    case Stage::reverse_dispatch:
      return windowed<ReverseDispatch>;
    case Stage::wgrad:
      return windowed<SwappedWgrad>;
    case Stage::reduce:
      return reduce;
    default:
      return nullptr;
  }
}

}  // namespace mok::host
