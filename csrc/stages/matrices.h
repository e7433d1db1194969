// matrices: what matrix products read, by name. A GPU has a tensor map for each (mok_modular/targets/cuda/launch.py).
#pragma once

#include "stages/stage.h"

namespace mok {

// Name, first element, columns. Those of a forward come first: kernels of a forward have maps of these alone.
#define MOK_FORWARD_MATRICES(M)                                                                          \
  M(x, t.x, s.hidden_size)                                                                               \
  M(ring_x, call.at<bf16>(Region::ring_x), s.hidden_size)                                                \
  M(context_x, t.context_x, s.hidden_size)                                                               \
  M(ring_hidden, call.at<bf16>(Region::ring_hidden), s.intermediate_size)                                \
  M(shared_hidden, t.saved_shared_hidden ? t.saved_shared_hidden : call.at<bf16>(Region::shared_hidden), \
    s.shared_size)                                                                                       \
  M(w_routed_gate, t.w_routed_gate, s.hidden_size)                                                       \
  M(w_routed_up, t.w_routed_up, s.hidden_size)                                                           \
  M(w_routed_down, t.w_routed_down, s.intermediate_size)                                                 \
  M(w_shared_gate, t.w_shared_gate, s.hidden_size)                                                       \
  M(w_shared_up, t.w_shared_up, s.hidden_size)                                                           \
  M(w_shared_down, t.w_shared_down, s.shared_size)
#define MOK_BACKWARD_MATRICES(M)                                                                         \
  M(d_output, t.d_output, s.hidden_size)                                                                 \
  M(ring_d_y, call.at<bf16>(Region::ring_d_y), s.hidden_size)                                            \
  M(saved_d_y, t.saved_d_y, s.hidden_size)                                                               \
  M(ring_d_gate, call.at<bf16>(Region::ring_d_gate), s.intermediate_size)                                \
  M(saved_d_gate, t.saved_d_gate, s.intermediate_size)                                                   \
  M(ring_d_up, call.at<bf16>(Region::ring_d_up), s.intermediate_size)                                    \
  M(saved_d_up, t.saved_d_up, s.intermediate_size)                                                       \
  M(saved_hidden, t.saved_hidden, s.intermediate_size)                                                   \
  M(ring_gate, call.at<bf16>(Region::ring_gate), s.intermediate_size)                                    \
  M(ring_up, call.at<bf16>(Region::ring_up), s.intermediate_size)                                        \
  M(w_dgrad_gate, t.w_dgrad_gate ? t.w_dgrad_gate : t.w_routed_gate, s.hidden_size)                      \
  M(w_dgrad_up, t.w_dgrad_up ? t.w_dgrad_up : t.w_routed_up, s.hidden_size)                              \
  M(shared_d_gate, t.saved_shared_d_gate ? t.saved_shared_d_gate : call.at<bf16>(Region::shared_d_gate), \
    s.shared_size)                                                                                       \
  M(shared_d_up, t.saved_shared_d_up ? t.saved_shared_d_up : call.at<bf16>(Region::shared_d_up), s.shared_size)

enum class Matrix : int32 {
#define MOK_NAME(name, base, width) name,
  MOK_FORWARD_MATRICES(MOK_NAME) kNumForward,
  kBeforeBackward = kNumForward - 1,
  MOK_BACKWARD_MATRICES(MOK_NAME) kNum
#undef MOK_NAME
};
constexpr int kNumForwardMatrices = static_cast<int>(Matrix::kNumForward);
constexpr int kNumMatrices = static_cast<int>(Matrix::kNum);

constexpr const char* forward_matrix_name(int index) {
#define MOK_NAME(name, base, width) #name,
  constexpr const char* kNames[] = {MOK_FORWARD_MATRICES(MOK_NAME)};
#undef MOK_NAME
  return kNames[index];
}

struct MatrixInMemory {
  const bf16* base;
  int64 width;  // elements from one row to the next
};
MOK_DEVICE MatrixInMemory matrix_in_memory(const Call& call, Matrix matrix) {
  const Tensors& t = call.tensors;
  const Shape& s = call.shape;
  switch (matrix) {
#define MOK_CASE(name, base, width) \
  case Matrix::name:                \
    return MatrixInMemory{base, width};
    MOK_FORWARD_MATRICES(MOK_CASE)
    MOK_BACKWARD_MATRICES(MOK_CASE)
#undef MOK_CASE
    default:
      return MatrixInMemory{nullptr, 0};
  }
}

// Where a tile's operand starts: row and column in memory, the matrices of all experts one after another.
struct Operand {
  Matrix matrix;
  int64 row;
  int64 col;
};

// Which index of an operand is contiguous in memory: k, or the tile's row (of A) or column (of B).
enum class Major { k, mn };

// A's rows are the tile's rows; B's are its columns, of one product or of two side by side (two accumulators).
struct Operands {
  Operand a;
  Operand b[2];
};

// From the first row of a row block on, where the rows are in the ring, or in `kept` where that holds macrobatch 0.
MOK_DEVICE Operand ring_operand(const Call& call, Matrix ring, Matrix kept, bool has_kept, int32 block) {
  const int64 row = block_ring_row(call.shape, block);
  const bool is_kept = has_kept && block_macrobatch(call.shape, block) == 0;
  return Operand{is_kept ? kept : ring, row, 0};
}

}  // namespace mok
