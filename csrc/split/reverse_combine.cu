// reverse_combine, alone in its kernel: one launch a generation.
#include "stages/reverse_combine.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(reverse_combine) { run_tasks<ReverseCombine>(args, launch, worker); }
}  // namespace mok::kernels
