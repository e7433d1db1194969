// How a CTA runs tasks of copy and element stages: the leader waits, all threads do the tile, the leader publishes.
#pragma once

#include "protocol/leave.h"
#include "stages/stage.h"
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

template <class S>
MOK_DEVICE bool run_stage(const Args& args, Worker& worker, const Task& task) {
  static_assert(!is_product(S::kStage), "matrix products have role loops of their own");
  return in_its_way(args.call.shape, S{}, [&](auto way) { return run_tile<decltype(way)>(args, worker, task); });
}

// One copy or element stage, alone in its kernel.
template <class S>
MOK_DEVICE void run_single(const Args& args, const Launch& launch, Worker& worker) {
  TaskSequence<S::kStage == Stage::dispatch> tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && next_task(tasks, worker, &task)) {
    worker.begin_task(task);
    is_running = run_stage<S>(args, worker, task);
  }
}
// The same for one that is windowed.
template <class S>
MOK_DEVICE void run_tasks(const Args& args, const Launch& launch, Worker& worker) {
  run_single<S>(args, launch, worker);
  worker.sync();
  if (worker.is_leader()) leave_last_group(args, launch, worker);
}

}  // namespace mok
