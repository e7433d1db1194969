// The weight gradients: a kernel of their own in split and partial plans, the last of a generation.
#include "stages/wgrad.h"

#include "targets/gemm_driver.h"

namespace mok::kernels {
MOK_GEMM_KERNEL(wgrad, Wgrad)
MOK_GEMM_KERNEL(shared_wgrad, SharedWgrad)
}  // namespace mok::kernels
