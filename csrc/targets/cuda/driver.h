// How a CTA runs tasks of copy and element stages: the leader waits, all threads do the tile, the leader publishes.
#pragma once

#include "protocol/leave.h"
#include "stages/combine.h"
#include "stages/dispatch.h"
#include "stages/publish.h"
#include "stages/quantize.h"
#include "stages/reduce.h"
#include "stages/swiglu.h"
#include "targets/cuda/worker.h"

// A kernel goes through the calls of all ranks that live on this GPU (one, between processes), each CTA
// starting at another one. CTAs are interchangeable: who comes draws the next task.
#define MOK_KERNEL(name) MOK_KERNEL_OF(name, mok::cuda::kCtasPerSm, nullptr, )
// name_first of all ranks comes before the rest of any: a rank's rest may wait for every other's first part.
#define MOK_PUSHING_KERNEL(name)                      \
  MOK_KERNEL_OF(name, mok::cuda::kCtasPerSm, nullptr, \
                for_each_call(set, worker, [&](const Args& args) { name##_first(args, launch, worker); }))
#define MOK_WIDE_KERNEL(name) MOK_KERNEL_OF(name, 2, nullptr, )  // fewer CTAs an SM: more registers a thread
#define MOK_COPY_KERNEL(name) MOK_KERNEL_OF(name, mok::cuda::kCtasPerSm, mok::cuda::open_ring(), )  // uses copy_rows
#define MOK_KERNEL_OF(name, kCtas, ring_pointer, first)                                                            \
  MOK_DEVICE void name##_body(const Args& args, const Launch& launch, mok::cuda::Worker& worker);                  \
  extern "C" __global__ void __launch_bounds__(mok::cuda::kThreads, kCtas)                                         \
      mok_##name(const __grid_constant__ CallSet set, const __grid_constant__ Launch launch MOK_TRACE_PARAMETER) { \
    __shared__ int scratch[4];                                                                                     \
    mok::cuda::Worker worker(scratch, launch.launch_idx, ring_pointer);                                            \
    MOK_TRACED(worker.open_track(trace_sink, launch);)                                                             \
    first;                                                                                                         \
    for_each_call(set, worker, [&](const Args& args) { name##_body(args, launch, worker); });                      \
  }                                                                                                                \
  MOK_DEVICE void name##_body(const Args& args, const Launch& launch, mok::cuda::Worker& worker)

namespace mok {

using cuda::Worker;

template <class F>
MOK_DEVICE void for_each_call(const CallSet& set, Worker& worker, F&& f) {
  for (int32 i = 0; i < set.num_calls; ++i) {
    const Args args(set.calls[(blockIdx.x + i) % set.num_calls]);
    worker.begin_call(args);
    f(args);
  }
}

template <class S, class TaskOfStage>
MOK_DEVICE bool run_tile(const Args& args, Worker& worker, const TaskOfStage& task) {
  Signals<Worker> signals(args, worker);
  const bool is_ready = worker.broadcast(worker.is_leader() ? S::needs(args, task, signals) : false);
  if (!is_ready) return false;
  S::tile(args, worker, task);
  worker.sync();
  if (worker.is_leader()) {
    MOK_TRACED(worker.trace(TraceKind::work);)
    S::publishes(args, task, signals);
    MOK_TRACED(worker.trace(TraceKind::publish);)
  }
  return true;
}

// The leader's next task, for all threads.
template <class TasksOfKernel>
MOK_DEVICE bool next_task(TasksOfKernel& tasks, Worker& worker, Task* task) {
  Task drawn;
  bool has_task = false;
  if (worker.is_leader()) has_task = tasks.next(worker, &drawn);
  return worker.broadcast_task(has_task, drawn, task);
}

// One copy or element stage, or several, in one kernel; stages with matrix products have role loops of their own.
template <Group kGroup, bool kHasPrologue = false>
MOK_DEVICE void run_tasks(const Args& args, const Launch& launch, Worker& worker) {
  TaskSequence<kGroup == group_bit(Stage::dispatch)> tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && next_task(tasks, worker, &task)) {
    worker.begin_task(task);
    if constexpr (holds(kGroup, Stage::dispatch)) {
      if (task.stage == Stage::dispatch)
        is_running = args.call.shape.is_push_dispatch ? run_tile<DispatchPush>(args, worker, task)
                                                      : run_tile<DispatchPull>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::swiglu)) {
      if (task.stage == Stage::swiglu) is_running = run_tile<Swiglu>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::quantize)) {
      if (task.stage == Stage::quantize) is_running = run_tile<Quantize>(args, worker, task);
    }
    if constexpr (holds(kGroup, Stage::combine)) {
      if (task.stage == Stage::combine)
        is_running = args.call.shape.is_pull_combine ? run_tile<CombinePull>(args, worker, task)
                                                     : run_tile<CombinePush>(args, worker, task);
    }
  }
  worker.sync();
  if (worker.is_leader()) leave_last_group(args, launch, worker);
}

template <class S, bool kIsGemm>
MOK_DEVICE void run_single(const Args& args, const Launch& launch, Worker& worker) {
  static_assert(!kIsGemm, "matrix products have role loops of their own");
  Tasks tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && next_task(tasks, worker, &task)) {
    worker.begin_task(task);
    is_running = run_tile<S>(args, worker, task);
  }
}

}  // namespace mok
