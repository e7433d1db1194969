// swiglu_backward: from bf16(d_h), gate and up of a row and its router weight w to d_gate, d_up, w * h and the row's
// part of d_router.
//
// h is not saved: it is computed again, to the same bits. d_router = sum of bf16(d_h) * h before the weight, so it is right
// for zero and negative weights. Then d_h * w in FP32, d_up = d_hw * silu(g), d_gate = d_hw * u * silu'(g) with
// silu'(g) = s (1 + g (1 - s)), s = 1 / (1 + exp(-g)), each rounded to BF16 once. With a limit, gradients pass where
// torch.clamp lets them: at equality too. The same function serves down_dgrad's epilogue. In MXFP8 d_gate and d_up are
// quantized with a scale for 32 columns; w * h stays BF16 (see quantize.h).
#pragma once

#include "mxfp8.h"
#include "stages/stage.h"

namespace mok {

struct SwigluGradient {
  float d_gate, d_up, weighted_hidden;  // to be rounded to BF16, once
  float router;                         // bf16(d_h) * h
};

// gate, up and d_hidden hold BF16 values.
MOK_DEVICE SwigluGradient swiglu_backward(const Call& call, float gate, float up, float d_hidden, float weight) {
  bool is_gate_free = true, is_up_free = true;
  if (call.has_swiglu_limit) {
    is_gate_free = gate <= call.swiglu_limit;
    is_up_free = up <= call.swiglu_limit && up >= -call.swiglu_limit;
    gate = clamp_above(gate, call.swiglu_limit);
    up = clamp_both(up, call.swiglu_limit);
  }
  const float sigmoid = rcp_f32(1.0f + exp_f32(-gate)), silu = gate * sigmoid;
  const float hidden = to_float(to_bf16(silu * up)), weighted = d_hidden * weight;
  const float slope = sigmoid * fmaf_f32(gate, 1.0f - sigmoid, 1.0f);
  SwigluGradient out;
  out.router = d_hidden * hidden;
  out.weighted_hidden = weight * hidden;
  out.d_gate = is_gate_free ? weighted * up * slope : 0.0f;
  out.d_up = is_up_free ? weighted * silu : 0.0f;
  return out;
}

struct SwigluBackward {
  static constexpr Stage kStage = Stage::swiglu_backward;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return wait_gate_up_replayed(args.call, task.block, signals) &&
           signals.wait_local(Edge::d_hidden_ready, task.block, arrivals(Edge::d_hidden_ready, args.call));
  }

  // A lane takes 32 columns of a row. Padding rows too: all they hold is zero, and so is what they leave.
  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first = task.part * kElementRows, num_groups = call.shape.intermediate_size / kLaneCols;
    const auto* gate = reinterpret_cast<const bf16x8*>(gate_row(call, task.block, first));
    const auto* up = reinterpret_cast<const bf16x8*>(up_row(call, task.block, first));
    const auto* d_hidden = reinterpret_cast<const bf16x8*>(d_hidden_row(call, task.block, first));
    auto* d_gate = reinterpret_cast<bf16x8*>(d_gate_row(call, task.block, first));
    auto* d_up = reinterpret_cast<bf16x8*>(d_up_row(call, task.block, first));
    auto* hidden = reinterpret_cast<bf16x8*>(hidden_row(call, task.block, first));
    const float* weights = row_weight(call, task.block, first);
    float* partials = router_partials(call, task.block, first);
    worker.for_each(kElementRows * num_groups, [&](int32 i) {
      float router[kLaneCols];
      bf16x8 gates[kLaneCols / 8], ups[kLaneCols / 8];
      MOK_UNROLL
      for (int32 j = 0; j < kLaneCols / 8; ++j) {
        const int32 at = i * (kLaneCols / 8) + j;
        const bf16x8 g = gate[at], u = up[at], d = d_hidden[at];
        bf16x8 out_hidden;
        MOK_UNROLL
        for (int32 pair = 0; pair < 4; ++pair) {
          SwigluGradient out[2];
          MOK_UNROLL
          for (int32 k = 0; k < 2; ++k) {
            const int32 e = 2 * pair + k;
            out[k] = swiglu_backward(call, element(g, e), element(u, e), element(d, e), weights[i / num_groups]);
            router[8 * j + e] = out[k].router;
          }
          gates[j].pairs[pair] = pack(to_bf16(out[0].d_gate), to_bf16(out[1].d_gate));
          ups[j].pairs[pair] = pack(to_bf16(out[0].d_up), to_bf16(out[1].d_up));
          out_hidden.pairs[pair] = pack(to_bf16(out[0].weighted_hidden), to_bf16(out[1].weighted_hidden));
        }
        hidden[at] = out_hidden;
      }
      const int32 at = i * (kLaneCols / 8);
      if (call.shape.is_mxfp8()) {
        round_trip(gates, d_gate + at);
        round_trip(ups, d_up + at);
      } else {
        MOK_UNROLL
        for (int32 j = 0; j < kLaneCols / 8; ++j) {
          d_gate[at + j] = gates[j];
          d_up[at + j] = ups[j];
        }
      }
      partials[i] = sum_of_columns(router);
    });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    say_d_gate_up_ready(args.call, task.block, signals);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kElementRows, kElementRows);
    return Cost{rows, 6 * rows * call.shape.intermediate_size * int64{sizeof(bf16)}, 0};
  }

  // Gate and up of later macrobatches are computed again in the backward itself.
  template <class W>
  MOK_DEVICE static bool wait_gate_up_replayed(const Call& call, int32 block, Signals<W>& signals) {
    return block_macrobatch(call.shape, block) == 0 ||
           signals.wait_local(Edge::gate_up_ready, block, arrivals(Edge::gate_up_ready, call));
  }
  template <class W>
  MOK_DEVICE static void say_d_gate_up_ready(const Call& call, int32 block, Signals<W>& signals) {
    signals.add(Edge::d_gate_up_ready, block);
    if (!call.shape.is_mxfp8()) say_segment_ready(call, block, signals);
  }
};

}  // namespace mok
