#include "targets/host/kernels.h"

namespace mok::kernels {

#define MOK_DECLARE(name, ...) void name(const Args& args, const Launch& launch, mok::host::Worker& worker);
MOK_STAGES(MOK_DECLARE)
#undef MOK_DECLARE

}  // namespace mok::kernels

namespace mok::host {

Kernel find_kernel(Group group, Stage stage) {
  constexpr Kernel kOfStage[] = {
#define MOK_KERNEL_OF(name, ...) kernels::name,
      MOK_STAGES(MOK_KERNEL_OF)
#undef MOK_KERNEL_OF
  };
  if (count_of(group) > 1) return kernels::persistent_kernel(group);
  return kOfStage[static_cast<int>(group ? first_of(group) : stage)];
}

}  // namespace mok::host
