// schedule: a call of its own, with its own epoch.
#include "stages/schedule.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(schedule) {
  Signals<Worker> signals(args, worker);
  ScheduleTask task;
  bool is_running = true;
  while (is_running && !is_aborted(args) &&
         ScheduleStage::decode(args.call, static_cast<int64>(worker.draw(args.counter(Edge::schedule_tickets, 0))),
                               &task)) {
    worker.begin_task(Task{Stage::schedule, task.src_rank, task.chunk});
    is_running = run_tile<ScheduleStage>(args, worker, task);
  }
  leave_call(args, Edge::schedule_exited, launch, worker);
}
}  // namespace mok::kernels
