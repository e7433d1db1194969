// quantize: the operands of the routed weight gradients in MXFP8, with one scale for 32 rows of a column.
//
// A weight gradient sums over rows, so its operands need scales along the rows; all others have theirs along the columns.
// x, d_y, d_gate and d_up come as they are after that first quantization, so it does not matter whether tokens travelled
// in BF16 or in MXFP8. Weight * h comes in BF16. On targets that multiply BF16, what is stored is again the values.
//
// No memory of their own: each takes the place of something in the ring that is used up once swiglu_backward of the row
// block is done. The context and what a dgrad apart saves are not touched.
#pragma once

#include "mxfp8.h"
#include "stages/gradient_operands.h"

namespace mok {

static_assert(kElementRows == kMxBlock, "a task holds whole blocks");

// 32 rows of `width` columns, the values after quantization along the rows; in place too.
template <class Worker>
MOK_DEVICE void round_trip_columns(Worker& worker, const bf16* from, bf16* to, int32 width) {
  const auto* source = reinterpret_cast<const bf16x8*>(from);
  auto* dst = reinterpret_cast<bf16x8*>(to);
  const int32 vectors = width / 8;
  worker.for_each(vectors, [&](int32 i) {
    // Twice through the rows, so that a thread keeps 8 maxima and not 256 values.
    Lanes8 scale = {};
    for (int32 row = 0; row < kMxBlock; ++row) {
      const Lanes8 lanes = unpack(source[row * vectors + i]);
      MOK_UNROLL
      for (int32 col = 0; col < 8; ++col) scale.bits[col] = max_of(scale.bits[col], magnitude(lanes.bits[col]));
    }
    MOK_UNROLL
    for (int32 col = 0; col < 8; ++col) scale.bits[col] = mx_scale(scale.bits[col]);
    for (int32 row = 0; row < kMxBlock; ++row) {
      Lanes8 lanes = unpack(source[row * vectors + i]);
      MOK_UNROLL
      for (int32 col = 0; col < 8; ++col) lanes.bits[col] = round_trip(lanes.bits[col], scale.bits[col]);
      dst[row * vectors + i] = pack(lanes);
    }
  });
}

struct Quantize {
  static constexpr Stage kStage = Stage::quantize;

  // Everything that the block's weight gradients read is there, and what gives way is used up. A wgrad apart finds all of
  // it in the caller's tensors.
  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    return !args.call.has_dgrad() ||
           signals.wait_local(Edge::d_gate_up_ready, task.block, arrivals(Edge::d_gate_up_ready, args.call));
  }

  // Padding rows are zeros: they change no scale and stay zeros (NaN in a block with one).
  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    const int32 first = task.part * kElementRows;
    for (int32 i = 0; i < kNumGradientOperands; ++i) {
      const auto operand = static_cast<GradientOperand>(i);
      round_trip_columns(worker, operand_row(call, operand, task.block, first),
                         columnwise_row(call, operand, task.block, first), operand_width(call, operand));
    }
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<Worker>& signals) {
    say_segment_ready(args.call, task.block, signals);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    const int64 rows = num_valid_rows(call, task.block, task.part * kElementRows, kElementRows);
    const int64 columns = 2 * int64{call.shape.hidden_size} + 3 * int64{call.shape.intermediate_size};
    return Cost{rows, 2 * rows * columns * int64{sizeof(bf16)}, 0};
  }
};

}  // namespace mok
