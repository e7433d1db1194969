// How a host worker runs tasks: wait, tile (or a product's loop and epilogue), publish.
#pragma once

#include "protocol/leave.h"
#include "protocol/stage_list.h"
#include "targets/host/kernels.h"
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

namespace mok::host {
template <class S>
void gemm_tile(const Call& call, Worker& worker, const Task& task);  // of targets/host/gemm.h
}  // namespace mok::host

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
bool run_product(const Args& args, Worker& worker, const Task& task) {
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

template <class S>
bool run_stage(const Args& args, Worker& worker, const Task& task) {
  return in_its_way(args.call.shape, S{}, [&](auto way) {
    using Way = decltype(way);
    if constexpr (is_product(Way::kStage))
      return run_product<Way>(args, worker, task);
    else
      return run_tile<Way>(args, worker, task);
  });
}

// All tasks of a launch, which are of the stages S.
template <class... S>
void run_launch(const Args& args, const Launch& launch, Worker& worker) {
  Tasks tasks(args, launch, worker.role());
  Task task;
  bool is_running = true;
  while (is_running && tasks.next(worker, &task)) {
    worker.begin_task(task);
    (void)((task.stage == S::kStage ? (is_running = run_stage<S>(args, worker, task), true) : false) || ...);
  }
}

// The waits of a task of a swapped stage. What tasks of the same stage bring would be waited for in this very kernel, and
// is not needed: `needs_of_other_kernels` leaves it out.
template <class S>
bool needs_where_swapped(const Args& args, const Task& task, Signals<Worker>& signals) {
  if constexpr (requires { S::needs_of_other_kernels(args, task, signals); })
    return S::needs_of_other_kernels(args, task, signals);
  else
    return S::needs(args, task, signals);
}

// A swapped stage, alone in its kernel: all waits of the launch, the caller's function once, all signals. This is what a
// kernel does that is launched when those before it have ended: a task waits only for kernels before it and for other
// ranks, so it is no deadlock. One worker.
template <class S>
void run_swapped(const Args& args, const Launch& launch, Worker& worker) {
  in_its_way(args.call.shape, S{}, [&](auto way) {
    using Way = decltype(way);
    Signals<Worker> signals(args, worker);
    Tasks tasks(args, launch, worker.role());
    std::vector<Task> drawn;
    Task task;
    while (tasks.next(worker, &task)) {
      worker.begin_task(task);
      if (!needs_where_swapped<Way>(args, task, signals)) return false;
      drawn.push_back(task);
    }
    if (drawn.empty() || is_aborted(args)) return false;
    const long long begin = host::now_ns();
    if (!worker.call_out(args)) return false;
    worker.stats(S::kStage).busy_ns += host::now_ns() - begin;
    Cost total;
    for (const Task& each : drawn) {
      const Cost cost = Way::cost(args.call, each);
      worker.count(S::kStage, cost);
      total.num_bytes += cost.num_bytes;
      total.num_flops += cost.num_flops;
    }
    worker.trace_work(total);
    for (const Task& each : drawn) Way::publishes(args, each, signals);
    worker.trace_publish();
    return true;
  });
}

// All tasks of one stage, or what stands in for them.
template <class S>
void run_single(const Args& args, const Launch& launch, Worker& worker) {
  if (worker.is_swapped())
    run_swapped<S>(args, launch, worker);
  else
    run_launch<S>(args, launch, worker);
}

// All tasks of a kernel of windowed stages (and, where it holds a whole pass, of its prologue).
template <class... S>
void run_tasks(const Args& args, const Launch& launch, Worker& worker) {
  if constexpr (sizeof...(S) == 1)
    run_single<S...>(args, launch, worker);
  else
    run_launch<S...>(args, launch, worker);
  leave_last_group(args, launch, worker);
}

}  // namespace mok
