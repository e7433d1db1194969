// quantize, alone in its kernel: one launch a generation, before the weight gradients.
#include "stages/quantize.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(quantize) { run_tasks<Quantize>(args, launch, worker); }
}  // namespace mok::kernels
