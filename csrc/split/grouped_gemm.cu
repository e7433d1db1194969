// The expert products, each alone in its kernel: one launch a generation for the routed experts.
#include "stages/grouped_gemm.h"

#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(gate_up) { run_tasks<group_bit(Stage::gate_up)>(args, launch, worker); }
MOK_KERNEL(down) { run_tasks<group_bit(Stage::down)>(args, launch, worker); }
MOK_KERNEL(shared_gate_up) { run_single<SharedGateUp, true>(args, launch, worker); }
MOK_KERNEL(shared_down) { run_single<SharedDown, true>(args, launch, worker); }
}  // namespace mok::kernels
