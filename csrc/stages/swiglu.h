// swiglu: h = bf16(silu(gate) * up), silu(g) = g / (1 + exp(-g)), from the BF16 gate and up.
//
// With a limit, gate is clamped above and up on both sides before (0.0 is a limit too). The same
// function serves gate_up's epilogue, so that fused and standalone give the same bits.
#pragma once

#include "stages/stage.h"

namespace mok {

// torch.clamp's comparisons: a NaN stays a NaN.
MOK_DEVICE float clamp_above(float value, float limit) { return value > limit ? limit : value; }
MOK_DEVICE float clamp_both(float value, float limit) {
  return value > limit ? limit : value < -limit ? -limit : value;
}

MOK_DEVICE bf16 swiglu(const Call& call, bf16 gate_value, bf16 up_value) {
  float gate = to_float(gate_value), up = to_float(up_value);
  if (call.has_swiglu_limit) {
    gate = clamp_above(gate, call.swiglu_limit);
    up = clamp_both(up, call.swiglu_limit);
  }
  const float silu = gate * rcp_f32(1.0f + exp_f32(-gate));
  return to_bf16(silu * up);
}

struct Swiglu {
  static constexpr Stage kStage = Stage::swiglu;
  static constexpr bool kIsCopyOnly = false;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return signals.wait_local(Edge::gate_up_ready, task.block, arrivals(Edge::gate_up_ready, args.call));
  }

  // Padding rows too: their gate and up are zero, and so is their h.
  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first = task.part * kElementRows;
    const bf16* gate = gate_row(call, task.block, first);
    const bf16* up = up_row(call, task.block, first);
    bf16* hidden = hidden_row(call, task.block, first);
    worker.for_each(int64{kElementRows} * call.shape.intermediate_size,
                    [&](int64 i) { hidden[i] = swiglu(call, gate[i], up[i]); });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args&, const Task& task, Signals<Worker>& signals) {
    signals.add(Edge::hidden_ready, task.block);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kElementRows, kElementRows);
    return Cost{rows, 3 * rows * call.shape.intermediate_size * int64{sizeof(bf16)}, 0};
  }
};

}  // namespace mok
