// swiglu, alone in its kernel: one launch a generation.
#include "stages/swiglu.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(swiglu) { run_tasks<Swiglu>(args, launch, worker); }
}  // namespace mok::kernels
