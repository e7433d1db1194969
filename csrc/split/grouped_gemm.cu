// The expert products, each alone in its kernel: one launch a generation for the routed experts. On a GPU
// the same kernels serve gate_up+swiglu and down+combine, whose second stage lives in the epilogue.
#include "stages/grouped_gemm.h"

#include "targets/gemm_driver.h"

namespace mok::kernels {
MOK_GEMM_KERNEL(gate_up, GateUp)
MOK_GEMM_KERNEL(down, Down)
MOK_GEMM_KERNEL(shared_gate_up, SharedGateUp)
MOK_GEMM_KERNEL(shared_down, SharedDown)
}  // namespace mok::kernels
