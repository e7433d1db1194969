// The stages of a kernel with matrix products: one, or several that a task tells apart.
#pragma once

#include "stages/grouped_gemm.h"
#include "stages/swiglu.h"

namespace mok::cuda::gemm {

// kHasSwiglu: swiglu is a task of its own, done by the consumers between their tiles.
template <bool kHasSwigluValue, class... S>
struct StageSet {
  static constexpr bool kHasSwiglu = kHasSwigluValue;
  static constexpr bool kHasGateUp = (S::kIsGateUp || ...), kHasDown = (!S::kIsGateUp || ...);

  MOK_DEVICE static bool is_swiglu(Stage stage) { return kHasSwiglu && stage == Stage::swiglu; }
  // f(S{}) for the product that `stage` names.
  template <class F>
  MOK_DEVICE static void visit(Stage stage, F&& f) {
    if constexpr (sizeof...(S) == 1)
      (f(S{}), ...);
    else
      (void)((stage == S::kStage ? (f(S{}), true) : false) || ...);
  }
};

// What a persistent kernel multiplies. The shared expert's products are in the kernel with all stages.
template <bool kHasGateUp, bool kHasDown, bool kHasShared, bool kHasSwiglu>
struct StageSetOf;
template <>
struct StageSetOf<true, true, true, false> {
  using Type = StageSet<false, GateUp, Down, SharedGateUp, SharedDown>;
};
template <>
struct StageSetOf<true, true, false, false> {
  using Type = StageSet<false, GateUp, Down>;
};
template <>
struct StageSetOf<true, false, false, false> {
  using Type = StageSet<false, GateUp>;
};
template <bool kHasSwiglu>
struct StageSetOf<false, true, false, kHasSwiglu> {
  using Type = StageSet<kHasSwiglu, Down>;
};

template <Group kGroup>
using StagesOfGroup =
    typename StageSetOf<holds(kGroup, Stage::gate_up), holds(kGroup, Stage::down), kGroup == kWholeForward,
                        holds(kGroup, Stage::swiglu) && !holds(kGroup, Stage::gate_up)>::Type;

}  // namespace mok::cuda::gemm
