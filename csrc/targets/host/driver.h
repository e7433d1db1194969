// How a host worker runs tasks: wait, tile (or GEMM loop and epilogue), publish.
#pragma once

#include "protocol/leave.h"
#include "stages/combine.h"
#include "stages/dispatch.h"
#include "stages/grouped_gemm.h"
#include "stages/publish.h"
#include "stages/quantize.h"
#include "stages/reduce.h"
#include "stages/reverse_combine.h"
#include "stages/reverse_dispatch.h"
#include "stages/swiglu.h"
#include "stages/swiglu_backward.h"
#include "targets/host/gemm.h"
#include "targets/host/worker.h"

#define MOK_WIDE_KERNEL(name) MOK_KERNEL(name)
#define MOK_COPY_KERNEL(name) MOK_KERNEL(name)
#define MOK_PUSHING_KERNEL(name)                                                       \
  void name##_body(const Args& args, const Launch& launch, mok::host::Worker& worker); \
  void name(const Args& args, const Launch& launch, mok::host::Worker& worker) {       \
    name##_first(args, launch, worker);                                                \
    name##_body(args, launch, worker);                                                 \
  }                                                                                    \
  void name##_body(const Args& args, const Launch& launch, mok::host::Worker& worker)
#define MOK_KERNEL(name) void name(const Args& args, const Launch& launch, mok::host::Worker& worker)

namespace mok {

using host::Worker;

// A copy or element stage.
template <class S, class TaskOfStage>
bool run_tile(const Args& args, Worker& worker, const TaskOfStage& task) {
  Signals<Worker> signals(args, worker);
  if (!S::needs(args, task, signals)) return false;
  const long long begin = host::now_ns();
  S::tile(args, worker, task);
  worker.stats(S::kStage).busy_ns += host::now_ns() - begin;
  const Cost cost = S::cost(args.call, task);
  worker.count(S::kStage, cost);
  worker.trace_work(cost);
  S::publishes(args, task, signals);
  worker.trace_publish();
  return true;
}

template <class S>
bool run_gemm(const Args& args, Worker& worker, const Task& task) {
  Signals<Worker> signals(args, worker);
  if (!S::needs(args, task, signals)) return false;
  host::gemm_tile<S>(args.call, worker, task);
  const Cost cost = S::cost(args.call, task);
  worker.count(S::kStage, cost);
  worker.trace_work(cost);
  S::publishes(args, task, signals);
  worker.trace_publish();
  return true;
}

// All tasks of a kernel that holds the stages of kGroup (and, fused, publish and the shared expert).
template <Group kGroup, bool kHasPrologue = false>
void run_tasks(const Args& args, const Launch& launch, Worker& worker) {
  Tasks tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && tasks.next(worker, &task)) {
    worker.begin_task(task);
    if constexpr (kHasPrologue) {
      if (task.stage == Stage::publish) is_running = run_tile<Publish>(args, worker, task);
    }
    if constexpr (kHasPrologue && holds(kGroup, Stage::down)) {
      if (task.stage == Stage::shared_gate_up) is_running = run_gemm<SharedGateUp>(args, worker, task);
      if (task.stage == Stage::shared_down) is_running = run_gemm<SharedDown>(args, worker, task);
    }
    if constexpr (kHasPrologue && holds(kGroup, Stage::wgrad)) {
      if (task.stage == Stage::shared_down_dgrad) is_running = run_gemm<SharedDownDgrad>(args, worker, task);
      if (task.stage == Stage::shared_gate_up_dgrad) is_running = run_gemm<SharedGateUpDgrad>(args, worker, task);
      if (task.stage == Stage::shared_wgrad) is_running = run_gemm<SharedWgrad>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::dispatch)) {
      if (task.stage == Stage::dispatch)
        is_running = args.call.shape.is_push_dispatch ? run_tile<DispatchPush>(args, worker, task)
                                                      : run_tile<DispatchPull>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::gate_up)) {
      if (task.stage == Stage::gate_up) is_running = run_gemm<GateUp>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::swiglu)) {
      if (task.stage == Stage::swiglu) is_running = run_tile<Swiglu>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::down)) {
      if (task.stage == Stage::down) is_running = run_gemm<Down>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::combine)) {
      if (task.stage == Stage::combine)
        is_running = args.call.shape.is_pull_combine ? run_tile<CombinePull>(args, worker, task)
                                                     : run_tile<CombinePush>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::reverse_combine)) {
      if (task.stage == Stage::reverse_combine) is_running = run_tile<ReverseCombine>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::down_dgrad)) {
      if (task.stage == Stage::down_dgrad) is_running = run_gemm<DownDgrad>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::swiglu_backward)) {
      if (task.stage == Stage::swiglu_backward) is_running = run_tile<SwigluBackward>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::gate_up_dgrad)) {
      if (task.stage == Stage::gate_up_dgrad) is_running = run_gemm<GateUpDgrad>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::reverse_dispatch)) {
      if (task.stage == Stage::reverse_dispatch) is_running = run_tile<ReverseDispatch>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::quantize)) {
      if (task.stage == Stage::quantize) is_running = run_tile<Quantize>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::wgrad)) {
      if (task.stage == Stage::wgrad) is_running = run_gemm<Wgrad>(args, worker, task);
    }
  }
  leave_last_group(args, launch, worker);
}

// All tasks of a kernel of one stage that is not cut into windows.
template <class S, bool kIsGemm>
void run_single(const Args& args, const Launch& launch, Worker& worker) {
  Tasks tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && tasks.next(worker, &task)) {
    worker.begin_task(task);
    if constexpr (kIsGemm)
      is_running = run_gemm<S>(args, worker, task);
    else
      is_running = run_tile<S>(args, worker, task);
  }
}

}  // namespace mok

// A kernel of several stages. With all five of a pass, publish and the shared expert are tasks of it too.
namespace mok::kernels {
template <Group kGroup>
MOK_KERNEL(persistent) {
  run_tasks<kGroup, kGroup == kWholeForward || kGroup == kWholeBackward>(args, launch, worker);
}
}  // namespace mok::kernels
#define MOK_PERSISTENT_KERNEL(name, ...) template void name<__VA_ARGS__>(const Args&, const Launch&, Worker&);

// kGroup 0: the stage is not cut into windows.
#define MOK_GEMM_KERNEL(name, S, kGroup)         \
  MOK_KERNEL(name) {                             \
    if constexpr ((kGroup) != 0)                 \
      run_tasks<(kGroup)>(args, launch, worker); \
    else                                         \
      run_single<S, true>(args, launch, worker); \
  }
