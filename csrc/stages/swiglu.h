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

// gate and up hold BF16 values.
MOK_DEVICE bf16 swiglu(const Call& call, float gate, float up) {
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
    const auto* gate = reinterpret_cast<const bf16x8*>(gate_row(call, task.block, first));
    const auto* up = reinterpret_cast<const bf16x8*>(up_row(call, task.block, first));
    auto* hidden = reinterpret_cast<bf16x8*>(hidden_row(call, task.block, first));
    worker.for_each(kElementRows * call.shape.intermediate_size / 8, [&](int32 i) {
      const bf16x8 g = gate[i], u = up[i];
      bf16x8 h;
      MOK_UNROLL
      for (int32 pair = 0; pair < 4; ++pair)
        h.pairs[pair] = pack(swiglu(call, element(g, 2 * pair), element(u, 2 * pair)),
                             swiglu(call, element(g, 2 * pair + 1), element(u, 2 * pair + 1)));
      hidden[i] = h;
    });
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
