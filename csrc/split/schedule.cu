// schedule: a call of its own, with its own epoch.
#include "stages/schedule.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(schedule) {
  Word* tickets = args.counter(Edge::schedule_tickets, 0);
  ScheduleTask task;
  bool is_running = true;
  while (is_running && ScheduleStage::decode(args.call, worker.next_ticket(args, tickets), &task)) {
    worker.begin_task(Task{Stage::schedule, task.src_rank, task.chunk, 0, 0});
    is_running = run_tile<ScheduleStage>(args, worker, task);
  }
  worker.sync();
  worker.once([&] { leave_call(args, Edge::schedule_exited, launch, worker); });
}
}  // namespace mok::kernels
