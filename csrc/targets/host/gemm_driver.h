// The host's kernels with matrix products, and the persistent kernels.
#pragma once

#include <utility>

#include "targets/host/driver.h"
#include "targets/host/gemm.h"

namespace mok {

template <class... S>
void run_tasks_of(StageList<S...>, const Args& args, const Launch& launch, Worker& worker) {
  run_tasks<S...>(args, launch, worker);
}

}  // namespace mok

#define MOK_GEMM_KERNEL(name, S)           \
  MOK_KERNEL(name) {                       \
    if constexpr (is_windowed(S::kStage))  \
      run_tasks<S>(args, launch, worker);  \
    else                                   \
      run_single<S>(args, launch, worker); \
  }

// A kernel for each group of the roster. `StagesOf<kGroup>`: the list of types that it holds.
#define MOK_PERSISTENT_KERNELS(StagesOf)                                                                               \
  template <Group kGroup>                                                                                              \
  MOK_KERNEL(persistent) {                                                                                             \
    run_tasks_of(StagesOf<kGroup>{}, args, launch, worker);                                                            \
  }                                                                                                                    \
  template <int... kIdx>                                                                                               \
  host::Kernel find_persistent(Group group, std::integer_sequence<int, kIdx...>) {                                     \
    host::Kernel found = nullptr;                                                                                      \
    (void)((group == kPlanGroups.groups[kIdx] ? (found = persistent<kPlanGroups.groups[kIdx]>, true) : false) || ...); \
    return found;                                                                                                      \
  }                                                                                                                    \
  host::Kernel persistent_kernel(Group group) {                                                                        \
    return find_persistent(group, std::make_integer_sequence<int, kNumPlanGroups>{});                                  \
  }
