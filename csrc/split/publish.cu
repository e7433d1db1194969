// publish, alone in its kernel.
#include "stages/publish.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_COPY_KERNEL(publish) { run_single<Publish>(args, launch, worker); }
}  // namespace mok::kernels
