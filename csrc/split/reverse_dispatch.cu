// reverse_dispatch, alone in its kernel: one launch a generation; the last one says done.
#include "stages/reverse_dispatch.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(reverse_dispatch) { run_tasks<ReverseDispatch>(args, launch, worker); }
}  // namespace mok::kernels
