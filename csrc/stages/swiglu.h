// swiglu: h = bf16(silu(gate) * up), silu(g) = g / (1 + exp(-g)), from the BF16 gate and up.
//
// With a limit, gate is clamped above and up on both sides before (0.0 is a limit too). The same
// function serves gate_up's epilogue, so that fused and standalone give the same bits. In MXFP8 the routed experts' h is
// quantized: 32 columns share a scale.
#pragma once

#include "mxfp8.h"
#include "stages/stage.h"

namespace mok {

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
    const int32 num_vectors = kElementRows * call.shape.intermediate_size / 8;
    if (!call.shape.is_mxfp8())
      return worker.for_each(num_vectors, [&](int32 i) { hidden[i] = of_vectors(call, gate[i], up[i]); });
    worker.for_each(num_vectors / 4, [&](int32 i) {
      bf16x8 block[4];
      MOK_UNROLL
      for (int32 v = 0; v < 4; ++v) block[v] = of_vectors(call, gate[4 * i + v], up[4 * i + v]);
      round_trip(block, hidden + 4 * i);
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

 private:
  // By value: through a reference, a GPU compiler loads words of 4 bytes.
  MOK_DEVICE static bf16x8 of_vectors(const Call& call, bf16x8 g, bf16x8 u) {
    bf16x8 h;
    MOK_UNROLL
    for (int32 pair = 0; pair < 4; ++pair)
      h.pairs[pair] = pack(swiglu(call, element(g, 2 * pair), element(u, 2 * pair)),
                           swiglu(call, element(g, 2 * pair + 1), element(u, 2 * pair + 1)));
    return h;
  }
};

}  // namespace mok
