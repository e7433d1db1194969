// Kernels whose tiles are one function of the caller's: a stage that stands alone, swapped for something else.
#pragma once

#include "targets/host/runtime.h"

namespace mok::host {

// null: this stage cannot be swapped.
Kernel find_swapped_kernel(Stage stage);

}  // namespace mok::host
