// swiglu_backward, alone in its kernel: one launch a generation.
#include "stages/swiglu_backward.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(swiglu_backward) { run_tasks<SwigluBackward>(args, launch, worker); }
}  // namespace mok::kernels
