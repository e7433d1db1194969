// combine, alone in its kernel: one launch a generation; the last one says done.
#include "stages/combine.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_COPY_KERNEL(combine) { run_tasks<Combine>(args, launch, worker); }
}  // namespace mok::kernels
