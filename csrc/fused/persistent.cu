// The persistent kernels: several stages in one, from the same stage code as split/.
//
// kGroup is a contiguous set of a forward's stages, or of the backward's that mirror them. Stages that share this
// kernel meet inside it: swiglu in gate_up's epilogue, combine in down's store pass, and their mirror images (stages/
// decides that from the plan). With all five, publish and the shared expert are tasks of the kernel too, and one launch
// serves all generations; in a backward so are replay and weight gradients.
#include "fused/stages.h"
#include "protocol/stage_list.h"

#include "targets/gemm_driver.h"

namespace mok::kernels {

// The types of all stages that can share a kernel, by the roster.
#define MOK_TYPE_windowed(Type) \
  +StageList<Type> {            \
  }
#define MOK_TYPE_prologue(Type) \
  +StageList<Type> {            \
  }
#define MOK_TYPE_last(Type)
#define MOK_TYPE_apart(Type)
#define MOK_TYPE(name, Type, file, place, ...) MOK_TYPE_##place(Type)
using AllStages = decltype(StageList<> {} MOK_STAGES(MOK_TYPE));

template <Group kGroup>
using StagesOfKernel = typename OnlyStages<stages_in_kernel(kGroup), AllStages>::Type;

MOK_PERSISTENT_KERNELS(StagesOfKernel)

}  // namespace mok::kernels
