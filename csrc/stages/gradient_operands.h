// What routed weight gradients multiply: rows of the ring, as wgrad reads them and as quantize leaves them.
#pragma once

#include "stages/stage.h"

namespace mok {

// What routed weight gradients multiply.
enum class GradientOperand : int32 { x, d_y, d_gate, d_up, hidden };
constexpr int kNumGradientOperands = 5;

MOK_DEVICE int32 operand_width(const Call& call, GradientOperand operand) {
  const bool is_wide = operand == GradientOperand::x || operand == GradientOperand::d_y;
  return is_wide ? call.shape.hidden_size : call.shape.intermediate_size;
}
MOK_DEVICE bf16* operand_row(const Call& call, GradientOperand operand, int32 block, int32 row_in_block) {
  switch (operand) {
    case GradientOperand::x:
      return x_row(call, block, row_in_block);
    case GradientOperand::d_y:
      return d_y_row(call, block, row_in_block);
    case GradientOperand::d_gate:
      return d_gate_row(call, block, row_in_block);
    case GradientOperand::d_up:
      return d_up_row(call, block, row_in_block);
    default:
      return hidden_row(call, block, row_in_block);
  }
}
// The same, quantized along the rows. gate_up has read x, down_dgrad d_y, swiglu_backward gate and up: they give way.
// gate_up_dgrad may not have read d_gate and d_up yet.
MOK_DEVICE bf16* columnwise_row(const Call& call, GradientOperand operand, int32 block, int32 row_in_block) {
  constexpr Region kRegions[kNumGradientOperands] = {Region::ring_x, Region::ring_d_y, Region::ring_gate,
                                                     Region::ring_up, Region::ring_hidden};
  return ring_row(call, kRegions[static_cast<int>(operand)], nullptr, operand_width(call, operand), block,
                  row_in_block);
}

}  // namespace mok
