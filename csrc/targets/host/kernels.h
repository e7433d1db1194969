// The host's kernels by what they hold.
#pragma once

#include "targets/host/runtime.h"

namespace mok::host {

// null: there is no such kernel.
Kernel find_kernel(Group group, Stage stage);

}  // namespace mok::host
