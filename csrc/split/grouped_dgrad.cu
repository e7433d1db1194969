// The backward's matrix products that give gradients of activations, each alone in its kernel.
#include "stages/grouped_dgrad.h"

#include "targets/gemm_driver.h"

namespace mok::kernels {
MOK_GEMM_KERNEL(down_dgrad, DownDgrad)
MOK_GEMM_KERNEL(gate_up_dgrad, GateUpDgrad)
MOK_GEMM_KERNEL(shared_down_dgrad, SharedDownDgrad)
MOK_GEMM_KERNEL(shared_gate_up_dgrad, SharedGateUpDgrad)
}  // namespace mok::kernels
