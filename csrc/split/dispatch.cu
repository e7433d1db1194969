// dispatch, alone in its kernel: one launch a generation.
#include "stages/dispatch.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_COPY_KERNEL(dispatch) { run_tasks<Dispatch>(args, launch, worker); }
}  // namespace mok::kernels
