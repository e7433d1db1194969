// The persistent kernels: several stages in one, from the same stage code as split/.
//
// kGroup is a contiguous set of a forward's stages, or of the backward's that mirror them. Stages that share this
// kernel meet inside it: swiglu in gate_up's epilogue, combine in down's store pass, and their mirror images (stages/
// decides that from the plan). With all five, publish and the shared expert are tasks of the kernel too, and one launch
// serves all generations; in a backward so are replay and weight gradients.
#include "targets/driver.h"

namespace mok::kernels {

template <Group kGroup>
MOK_KERNEL(persistent) {
  run_tasks<kGroup, kGroup == kWholeForward || kGroup == kWholeBackward>(args, launch, worker);
}

#define MOK_PERSISTENT(...) template void persistent<__VA_ARGS__>(const Args&, const Launch&, Worker&);
#define MOK_GROUP(first, last) MOK_PERSISTENT(group_of(Stage::first, Stage::last))
MOK_GROUP(dispatch, gate_up)  // also a replay
MOK_GROUP(dispatch, swiglu)
MOK_GROUP(dispatch, down)
MOK_GROUP(dispatch, combine)
MOK_GROUP(gate_up, swiglu)
MOK_GROUP(gate_up, down)
MOK_GROUP(gate_up, combine)
MOK_GROUP(swiglu, down)
MOK_GROUP(swiglu, combine)
MOK_GROUP(down, combine)
MOK_GROUP(reverse_combine, down_dgrad)
MOK_GROUP(reverse_combine, swiglu_backward)
MOK_GROUP(reverse_combine, gate_up_dgrad)
MOK_PERSISTENT(kWholeBackward)
MOK_GROUP(down_dgrad, swiglu_backward)
MOK_GROUP(down_dgrad, gate_up_dgrad)
MOK_GROUP(down_dgrad, reverse_dispatch)
MOK_GROUP(swiglu_backward, gate_up_dgrad)
MOK_GROUP(swiglu_backward, reverse_dispatch)
MOK_GROUP(gate_up_dgrad, reverse_dispatch)
#undef MOK_GROUP
#undef MOK_PERSISTENT

}  // namespace mok::kernels
