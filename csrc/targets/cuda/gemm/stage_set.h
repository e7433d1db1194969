// The stages of a kernel with matrix products: one, or several that a task tells apart.
#pragma once

#include "protocol/stage_list.h"
#include "stages/product.h"
#include "stages/swiglu.h"
#include "targets/cuda/gemm/shared.h"

namespace mok::cuda::gemm {

// Types, each once, and a choice of one of them by its place.
template <class... T>
struct TypeList {
  static constexpr int kNum = sizeof...(T);
  template <class Type>
  using With = TypeList<T..., Type>;
  template <class Type>
  static constexpr int place() {
    int place = 0;
    (void)((kIsSame<T, Type> || (++place, false)) || ...);
    return place;
  }
  // f(T{}) for the type at `place`.
  template <class F>
  MOK_DEVICE static void visit(int32 place, F&& f) {
    int32 i = 0;
    (void)((i++ == place || i == kNum ? (f(T{}), true) : false) || ...);
  }

 private:
  template <class A, class B>
  static constexpr bool kIsSame = false;
  template <class A>
  static constexpr bool kIsSame<A, A> = true;
};
template <class List>
constexpr List unique(List) {
  return {};
}
template <class List, class First, class... Rest>
constexpr auto unique(List list, First, Rest... rest) {
  if constexpr (List::template place<First>() < List::kNum)
    return unique(list, rest...);
  else
    return unique(typename List::template With<First>(), rest...);
}

// kHasSwiglu: swiglu is a task of its own, done by the consumers between their tiles.
template <bool kHasSwigluValue, class... S>
struct StageSet {
  static constexpr bool kHasSwiglu = kHasSwigluValue;
  static constexpr bool kIsBackward = (S::kIsBackward || ...), kHasSums = (S::kHasSums || ...);
  static constexpr Major kMajorB = ((S::kMajorB == Major::mn) || ...) ? Major::mn : Major::k;
  static_assert(((S::kMajorB == kMajorB) && ...), "one kernel, one form of B");
  // The products whose code turns accumulators into planes.
  using Epilogues = decltype(unique(TypeList<>(), typename S::Epilogue()...));

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

template <bool kIsBackward>
struct MapsOfPass {
  using Type = ForwardMaps;
};
template <>
struct MapsOfPass<true> {
  using Type = BackwardMaps;
};
template <class Stages>
using MapsOf = typename MapsOfPass<Stages::kIsBackward>::Type;

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

}  // namespace mok::cuda::gemm
