// What the last worker of a kernel does when it leaves.
#pragma once

#include "protocol/tasks.h"

namespace mok {

// Behind the last remote access of a call: tell every rank that this one is done, surplus generation or
// not (a rank without rows has only surplus ones). Its own publish comes first: a `done` before it would let a
// peer overwrite what a third rank has yet to read under the old epoch.
template <class Worker>
MOK_DEVICE void leave_last_group(const Args& args, const Launch& launch, Worker& worker) {
  Signals<Worker> signals(args, worker);
  if (!launch.is_last_group || is_aborted(args)) return;
  if (!signals.arrive(Edge::exited, launch.launch_idx, worker.num_workers())) return;
  if (!signals.wait_local(Edge::published, 0, num_publish_tasks(args.call))) return;
  signals.set_all_ranks(Edge::done);
}

// The last kernel of a call or schedule: the next one counts from here. Never after an abort: an aborted
// call is not finished, and reset agrees on new epochs.
template <class Worker>
MOK_DEVICE void leave_call(const Args& args, Edge exited, const Launch& launch, Worker& worker) {
  Signals<Worker> signals(args, worker);
  if (is_aborted(args)) return worker.report_abort(args);
  if (!signals.arrive(exited, exited == Edge::exited ? launch.launch_idx : 0, worker.num_workers())) return;
  Epochs* epochs = args.call.at<Epochs>(Region::epochs);
  if (exited == Edge::exited)
    epochs->call += 1;
  else
    epochs->schedule += 1;
  epochs->order += 1;
}

}  // namespace mok
