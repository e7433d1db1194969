// The persistent kernels: several stages in one, from the same stage code as split/.
//
// kGroup is a contiguous set of fusible stages. Stages that share this kernel meet inside it: swiglu in
// gate_up's epilogue, combine in down's store pass (stages/ decides that from the plan). With all five,
// publish and the shared expert are tasks of the kernel too, and one launch serves all generations.
#include "targets/driver.h"

namespace mok::kernels {

template <Group kGroup>
MOK_KERNEL(persistent) {
  run_tasks<kGroup, kGroup == kAllFusible>(args, launch, worker);
}

constexpr Group group_of(Stage first, Stage last) {
  return (2u << static_cast<int>(last)) - (1u << static_cast<int>(first));
}

#define MOK_PERSISTENT(first, last) \
  template void persistent<group_of(Stage::first, Stage::last)>(const Args&, const Launch&, Worker&);
MOK_PERSISTENT(dispatch, gate_up)
MOK_PERSISTENT(dispatch, swiglu)
MOK_PERSISTENT(dispatch, down)
MOK_PERSISTENT(dispatch, combine)
MOK_PERSISTENT(gate_up, swiglu)
MOK_PERSISTENT(gate_up, down)
MOK_PERSISTENT(gate_up, combine)
MOK_PERSISTENT(swiglu, down)
MOK_PERSISTENT(swiglu, combine)
MOK_PERSISTENT(down, combine)
#undef MOK_PERSISTENT

}  // namespace mok::kernels
