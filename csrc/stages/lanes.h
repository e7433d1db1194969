// lanes: who holds 32 neighbouring columns of a row in an epilogue. A target has a type of its own, or this one.
//
//   kNum             columns per lane; value i of a lane is column column(i) of the 32
//   max(value)       over all lanes of the row; every lane calls
//   sum(values)      of all 32 columns, in the tree of sum_of_columns; every lane calls
//   is_first()       true in one lane per row, which may write what the row has once; false where the row is padding
#pragma once

#include "numeric.h"

namespace mok {

// One lane holds them all.
struct OneLane {
  static constexpr int kNum = 32;
  bool has_row = true;
  MOK_DEVICE int32 column(int32 i) const { return i; }
  MOK_DEVICE bool is_first() const { return has_row; }
  MOK_DEVICE uint32 max(uint32 value) const { return value; }
  MOK_DEVICE float sum(const float (&values)[kNum]) const { return sum_of_columns(values); }
};

}  // namespace mok
