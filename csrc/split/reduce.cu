// reduce: the last kernel of a forward in every plan.
#include "stages/reduce.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_WIDE_KERNEL(reduce) {
  run_single<Reduce>(args, launch, worker);
  if (is_aborted(args)) Reduce::poison(args.call, worker);
  worker.sync();
  worker.once([&] { leave_call(args, Edge::exited, launch, worker); });
}
}  // namespace mok::kernels
