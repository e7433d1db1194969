// The host's kernels by what they hold.
#pragma once

#include "targets/host/runtime.h"

namespace mok::host {

// null: there is no such kernel. `stage` tells those apart that are not windowed (group 0).
Kernel find_kernel(Group group, Stage stage);

}  // namespace mok::host

namespace mok::kernels {

host::Kernel persistent_kernel(Group group);  // of several stages; null: no plan has them together

}  // namespace mok::kernels
