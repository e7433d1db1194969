// schedule: a call of its own, with its own epoch.
#include "stages/schedule.h"

#include "targets/driver.h"

namespace mok::kernels {

// The tasks of a part, by its tickets.
MOK_DEVICE bool run_schedule_tasks(const Args& args, Worker& worker, ScheduleStage::Part part) {
  Word* tickets = args.counter(Edge::schedule_tickets, static_cast<int32>(part));
  ScheduleTask task;
  while (ScheduleStage::decode(args.call, part, worker.next_ticket(args, tickets), &task)) {
    worker.begin_task(Task{Stage::schedule, task.src_rank, task.chunk, 0, 0});
    if (!run_tile<ScheduleStage>(args, worker, task)) return false;
  }
  return true;
}

MOK_DEVICE void schedule_first(const Args& args, const Launch&, Worker& worker) {
  run_schedule_tasks(args, worker, ScheduleStage::Part::pushes);
}
MOK_PUSHING_KERNEL(schedule) {
  run_schedule_tasks(args, worker, ScheduleStage::Part::rest);
  worker.sync();
  worker.once([&] { leave_call(args, Edge::schedule_exited, launch, worker); });
}

}  // namespace mok::kernels
