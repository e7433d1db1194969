// C[rows, cols] += A[rows, k] * B[cols, k]^T for BF16 operands and FP32 sums, k ascending. Either operand may stand
// in memory with k contiguous, or transposed.
#pragma once

#include <vector>

#include "numeric.h"

namespace mok::host {

struct MatrixView {
  const bf16* data = nullptr;
  int64 pitch = 0;             // elements from one row in memory to the next
  bool is_transposed = false;  // rows in memory are k
};

// `acc` is [rows, num_b * pitch]: the products with b[0] in columns [0, num_cols), with b[1] from `pitch` on.
// Each sum is one chain over k, so a result does not depend on how many rows stand beside it.
void multiply(int num_rows, int num_cols, int num_b, int pitch, int64 k, const MatrixView& a, const MatrixView (&b)[2],
              float* acc, std::vector<float>& a_panel, std::vector<float>& b_panel);

}  // namespace mok::host
