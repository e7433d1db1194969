// reduce: a token's output from its routes, acc = shared; acc = fmaf(w_k, row_k, acc) for k ascending. In a backward the
// output is d_x: its rows hold the router weight already, and d_router is collected too. The last kernel of every call:
// where there is no output, its one task waits for all ranks.
//
// Missing routes are skipped, not read: their cells and weights may hold anything.
#pragma once

#include "stages/stage.h"

namespace mok {

struct Reduce {
  static constexpr Stage kStage = Stage::reduce;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<Worker>& signals) {
    const Call& call = args.call;
    for (int32 src = 0; src < call.shape.num_ranks; ++src)
      if (!signals.wait_rank_once(Edge::done, src, signals.seen_dones())) return false;
    if (!call.shape.shared_size || num_tokens(call, task) == 0 || !has_output(call)) return true;
    const int32 first = task.part * kReduceTokens / call.shape.row_block();
    return signals.wait_local(Edge::shared_ready, first, arrivals(Edge::shared_ready, call));
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    if (!has_output(call)) return;
    const int32 vectors = call.shape.hidden_size / 8, topk = call.shape.topk;  // of a row
    const int64 first = int64{task.part} * kReduceTokens;
    const auto* shared =
        reinterpret_cast<const bf16x8*>(call.shape.shared_size ? call.at<bf16>(Region::shared_y) : nullptr);
    const auto* combined = reinterpret_cast<const bf16x8*>(call.at<bf16>(Region::combine));
    auto* output = reinterpret_cast<bf16x8*>(call.tensors.output);
    worker.for_each(num_tokens(call, task) * vectors, [&](int32 i) {
      const int64 token = first + i / vectors, column = i % vectors;
      float acc[8] = {};
      if (shared) set_row(shared[token * vectors + column], acc);
      // Rows are read kBatch at a time, so that several loads are in flight; the sums stay in order of k.
      for (int32 begin = 0; begin < topk; begin += kBatch) {
        bf16x8 row[kBatch];
        bool is_route[kBatch];
        MOK_UNROLL
        for (int32 k = 0; k < kBatch; ++k) {
          const int64 route = token * topk + begin + k;
          is_route[k] = begin + k < topk && call.schedule.route_rank[route] >= 0;
          if (is_route[k]) row[k] = combined[route * vectors + column];
        }
        MOK_UNROLL
        for (int32 k = 0; k < kBatch; ++k)
          if (is_route[k]) add_weighted_row(weight(call, token * topk + begin + k), row[k], acc);
      }
      bf16x8 out;
      MOK_UNROLL
      for (int32 pair = 0; pair < 4; ++pair) out.pairs[pair] = pack(to_bf16(acc[2 * pair]), to_bf16(acc[2 * pair + 1]));
      output[token * vectors + column] = out;
    });
    if (!call.is_backward()) return;
    worker.for_each(num_tokens(call, task) * topk, [&](int32 i) {
      const int64 route = first * topk + i;
      call.tensors.d_router[route] =
          call.schedule.route_rank[route] >= 0 ? call.at<float>(Region::d_router)[route] : 0.0f;
    });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args&, const Task&, Signals<Worker>&) {}

  // What an aborted call hands out is NaN: an optimizer step may already stand behind it in the queue.
  template <class Worker>
  MOK_DEVICE static void poison(const Call& call, Worker& worker) {
    const Shape& s = call.shape;
    const Tensors& t = call.tensors;
    const int64 bf16_bytes = sizeof(bf16);
    poison(worker, t.output, call.num_tokens * bf16_bytes * s.hidden_size);
    if (!call.is_backward()) return;
    poison(worker, t.d_router, call.num_tokens * int64{sizeof(float)} * s.topk);
    const int64 element_bytes = t.d_weights.mode == GradientMode::add_fp32 ? sizeof(float) : sizeof(bf16);
    const int64 shared_bytes = element_bytes * s.shared_size * s.hidden_size;
    const int64 routed_bytes = element_bytes * s.num_local_experts * s.intermediate_size * s.hidden_size;
    poison(worker, t.d_weights.routed_gate, routed_bytes);
    poison(worker, t.d_weights.routed_up, routed_bytes);
    poison(worker, t.d_weights.routed_down, routed_bytes);
    poison(worker, t.d_weights.shared_gate, shared_bytes);
    poison(worker, t.d_weights.shared_up, shared_bytes);
    poison(worker, t.d_weights.shared_down, shared_bytes);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    if (!has_output(call)) return Cost{};
    const int64 tokens = num_tokens(call, task), width = call.shape.hidden_size;
    int64 routes = 0;
    for (int64 i = 0; i < tokens * call.shape.topk; ++i)
      routes += call.schedule.route_rank[int64{task.part} * kReduceTokens * call.shape.topk + i] >= 0;
    const int64 rows = routes + tokens + (call.shape.shared_size ? tokens : 0);
    return Cost{tokens, rows * width * int64{sizeof(bf16)}, 2 * routes * width};
  }

 private:
  static constexpr int32 kBatch = MOK_REDUCE_BATCH;

  MOK_DEVICE static bool has_output(const Call& call) { return call.kind == CallKind::forward || call.has_dgrad(); }
  MOK_DEVICE static float weight(const Call& call, int64 route) {
    return call.is_backward() ? 1.0f : call.tensors.router_weights[route];
  }
  // Whole words of 0xff; a null tensor is left out. Sizes are multiples of four bytes.
  template <class Worker>
  MOK_DEVICE static void poison(Worker& worker, void* tensor, int64 num_bytes) {
    constexpr int64 kChunk = 1 << 14;
    if (!tensor) return;
    for (int64 first = worker.index() * kChunk; first < num_bytes / 4; first += worker.num_workers() * kChunk)
      worker.for_each(min_of(kChunk, num_bytes / 4 - first),
                      [&](int64 i) { static_cast<uint32*>(tensor)[first + i] = 0xffffffffu; });
  }

  MOK_DEVICE static void set_row(const bf16x8& row, float (&acc)[8]) {
    MOK_UNROLL
    for (int32 i = 0; i < 8; ++i) acc[i] = element(row, i);
  }
  MOK_DEVICE static void add_weighted_row(float weight, const bf16x8& row, float (&acc)[8]) {
    MOK_UNROLL
    for (int32 i = 0; i < 8; ++i) acc[i] = fmaf_f32(weight, element(row, i), acc[i]);
  }
  MOK_DEVICE static int32 num_tokens(const Call& call, const Task& task) {
    return max_of(0, min_of(kReduceTokens, call.num_tokens - task.part * kReduceTokens));
  }
};

}  // namespace mok
