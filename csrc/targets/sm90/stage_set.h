// The stages of a kernel with matrix products: one, or several that a task tells apart.
#pragma once

#include "protocol/stage_list.h"
#include "stages/grouped_gemm.h"
#include "stages/swiglu.h"

namespace mok::sm90 {

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

// What a persistent kernel multiplies: the products of a list, and swiglu where gate_up is not there to do it.
template <class List>
struct StageSetOf;
template <class... S>
struct StageSetOf<StageList<S...>> {
  using Type = StageSet<false, S...>;
};
template <class... S>
struct StageSetOf<StageList<Swiglu, S...>> {
  using Type = StageSet<true, S...>;
};
template <class List>
constexpr StageMask kDoneByConsumers =
    stages_of(Work::product) | (List::kStages & stage_bit(Stage::gate_up) ? 0 : stage_bit(Stage::swiglu));
template <class List>
using ProductsOf = typename StageSetOf<typename OnlyStages<kDoneByConsumers<List>, List>::Type>::Type;

}  // namespace mok::sm90
