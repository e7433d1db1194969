// Lists of stage types, as a kernel is made of them.
#pragma once

#include "protocol/roster.h"

namespace mok {

template <class... S>
struct StageList {
  static constexpr StageMask kStages = (StageMask{0} | ... | stage_bit(S::kStage));
};
template <class... A, class... B>
StageList<A..., B...> operator+(StageList<A...>, StageList<B...>);

// The stages of a list that are in a mask.
template <StageMask kMask, class List>
struct OnlyStages;
template <StageMask kMask, class S, bool kIsIn = (kMask & stage_bit(S::kStage)) != 0>
struct OneIfIn {
  using Type = StageList<>;
};
template <StageMask kMask, class S>
struct OneIfIn<kMask, S, true> {
  using Type = StageList<S>;
};
template <StageMask kMask, class... S>
struct OnlyStages<kMask, StageList<S...>> {
  using Type = decltype((StageList<>{} + ... + typename OneIfIn<kMask, S>::Type{}));
};

}  // namespace mok
