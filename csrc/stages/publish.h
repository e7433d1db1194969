// publish: a rank's input becomes readable for its peers: x; in a backward d_output, the router weights, and x if a
// replay may need it. Where tokens travel in MXFP8, this is where they are quantized.
//
// Every rank publishes, with tokens or without; one without peers copies nothing in a forward. The input of the last call
// may be overwritten only when every rank is done with it, so this is where a call waits for the `done` of the one before.
#pragma once

#include "stages/token_rows.h"

namespace mok {

struct Publish {
  static constexpr Stage kStage = Stage::publish;

  template <class Worker>
  MOK_DEVICE static bool needs(const Args&, const Task& task, Signals<Worker>& signals) {
    // "I have entered": peers may write here from now on. Before any wait, so that nobody waits in a circle.
    if (task.part == 0) signals.set_all_ranks(Edge::entered);
    return signals.wait_all_ranks(Edge::done, /*epochs_back=*/1);
  }

  template <class Worker>
  MOK_DEVICE static void tile(const Args& args, Worker& worker, const Task& task) {
    const Call& call = args.call;
    if (task.part == 0) clear_next_bank(args, worker);
    if (!call.is_backward() || call.can_replay())
      publish_rows(call, worker, task, call.shape.is_mxfp8_wire() ? Region::x_quantized : Region::x, call.tensors.x);
    if (!call.has_dgrad()) return;
    publish_rows(call, worker, task, Region::d_output, call.tensors.d_output);
    const int64 first = int64{task.part} * kPublishRows * call.shape.topk;
    float* weights = call.at<float>(Region::router_weights) + first;
    worker.for_each(num_tokens(call, task) * call.shape.topk,
                    [&](int32 i) { weights[i] = call.tensors.router_weights[first + i]; });
  }

  template <class Worker>
  MOK_DEVICE static void publishes(const Args& args, const Task&, Signals<Worker>& signals) {
    if (signals.arrive(Edge::published, 0, num_publish_tasks(args.call))) signals.set_all_ranks(Edge::input_ready);
  }

  MOK_DEVICE static Cost cost(const Call& call, const Task& task) {
    if (call.is_input_in_place()) return Cost{call.num_tokens, 0, 0};
    const int64 rows = num_tokens(call, task);
    const int64 matrices = (!call.is_backward() || call.can_replay()) + call.has_dgrad();
    return Cost{rows, matrices * token_rows_bytes(call, rows), 0};
  }

 private:
  template <class Worker>
  MOK_DEVICE static void publish_rows(const Call& call, Worker& worker, const Task& task, Region region,
                                      const bf16* from) {
    const int64 width = call.shape.hidden_size, first = int64{task.part} * kPublishRows;
    if (call.shape.is_mxfp8_wire())
      return quantize_token_rows(call, worker, num_tokens(call, task), from + first * width,
                                 call.at<char>(region) + first * call.shape.token_row_bytes());
    bf16* published = call.at<bf16>(region);
    if (published == from) return;  // the caller wrote the symmetric buffer itself, or there are no peers
    worker.copy_rows(
        num_tokens(call, task), width * sizeof(bf16), [&](int32 i) { return published + (first + i) * width; },
        [&](int32 i) { return from + (first + i) * width; });
  }
  MOK_DEVICE static int32 num_tokens(const Call& call, const Task& task) {
    return max_of(0, min_of(kPublishRows, call.num_tokens - task.part * kPublishRows));
  }
  // The counters of the next call were used by the one before this, which is over.
  template <class Worker>
  MOK_DEVICE static void clear_next_bank(const Args& args, Worker& worker) {
    const Call& call = args.call;
    Word* bank = call.at<Word>(Region::counters) + static_cast<int64>((args.call_epoch + 1) & 1) * call.call_bank;
    worker.for_each(call.call_bank, [&](int32 i) { bank[i] = 0; });
  }
};

}  // namespace mok
