#include "explore/faults.h"

#include <algorithm>

namespace mok_explore {

std::vector<std::string> fault_names() {
  return {"one_id_region",
          "tokens_in_topk_word",
          "recompute_without_done",
          "recompute_returns_early",
          "done_without_parity",
          "done_before_publish",
          "ring_counts_generations",
          "macrobatch_0_does_not_wait",
          "replay_does_not_wait",
          "reverse_combine_does_not_wait",
          "order_across_generations",
          "carry_without_read_edge",
          "wgrad_beside_down_dgrad",
          "surplus_sends_no_done",
          "reset_zeroes_done",
          "writes_after_false_wait",
          "lost_signal",
          "push_without_entered",
          "counts_of_another_plan",
          "copies_without_x_ready",
          "roles_counted_by_call"};
}

}  // namespace mok_explore

namespace mok::explore {

std::vector<Record> Faults::planted(const Args& args, Stage stage, const Task& task, std::vector<Record> records) {
  if (fault_.empty()) return records;
  const Call& call = args.call;
  const bool waits_slot =
      std::any_of(records.begin(), records.end(), [](const Record& r) { return r.edge == Edge::slot_free; });
  for (std::size_t i = 0; i < records.size();) {
    if (!is_dropped(call, stage, task, records[i])) {
      change(args, stage, records[i++]);
      continue;
    }
    for (std::size_t j = 0; j < i; ++j)
      if (j + static_cast<std::size_t>(records[j].skip) >= i) records[j].skip -= 1;
    records.erase(records.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (is("ring_counts_generations") && stage == Stage::dispatch && call.kind == CallKind::forward && !waits_slot) {
    const Shape& s = call.shape;
    const int32 before = block_macrobatch(s, task.block) + 1;
    const bool is_need = !records.empty() && records.front().op != Op::add && before < num_generations(call);
    const int64 index = slot_index(s, before, block_slot(s, task.block));
    const Word want = static_cast<Word>(arrivals(Edge::slot_free, call));
    if (is_need)
      records.insert(records.begin(), {Op::wait, Edge::slot_free, index, args.counter(Edge::slot_free, index), want,
                                       call.rank, call.rank});
  }
  return records;
}

bool Faults::is_dropped(const Call& call, Stage stage, const Task& task, const Record& record) {
  const bool is_wait = record.op == Op::wait || record.op == Op::wait_exact;
  const bool waits_slot = is_wait && record.edge == Edge::slot_free;
  const bool is_dispatch = stage == Stage::dispatch;
  if (is("macrobatch_0_does_not_wait"))
    return waits_slot && is_dispatch && !call.is_backward() && block_macrobatch(call.shape, task.block) == 0;
  if (is("replay_does_not_wait")) return waits_slot && is_dispatch && call.is_backward();
  if (is("reverse_combine_does_not_wait")) return waits_slot && stage == Stage::reverse_combine;
  if (is("carry_without_read_edge"))
    return is_wait && record.edge == Edge::carry_done &&
           record.index / num_carry_units(call.shape) == block_macrobatch(call.shape, task.block);
  if (is("push_without_entered")) return is_wait && is_dispatch && record.edge == Edge::entered;
  if (is("copies_without_x_ready")) return is_wait && is_dispatch && record.edge == Edge::x_ready;
  if (is("done_before_publish")) return is_wait && record.edge == Edge::published;
  if (!is("lost_signal") || record.op != Op::add || record.edge != Edge::x_ready || is_lost_) return false;
  is_lost_ = true;
  return true;
}

void Faults::change(const Args& args, Stage stage, Record& record) const {
  if (is("recompute_without_done") && stage == Stage::publish && record.edge == Edge::done) {
    record.value = last_done_epoch_;
    record.word = args.word(Edge::done, record.value, record.src_rank, record.at_rank);
  }
  if (is("done_without_parity") && record.edge == Edge::done)
    record.word = args.word(Edge::done, 0, record.src_rank, record.at_rank);
  if (is("counts_of_another_plan") && stage == Stage::down && record.edge == Edge::hidden_ready) {
    Call other = args.call;
    const bool is_one_kernel = is_swiglu_in_gate_up(other);
    for (const Stage each : {Stage::gate_up, Stage::swiglu})
      other.groups[static_cast<int>(each)] =
          is_one_kernel ? group_bit(each) : group_bit(Stage::gate_up) | group_bit(Stage::swiglu);
    record.value = static_cast<Word>(arrivals(Edge::hidden_ready, other));
  }
}

bool Faults::returns_early(const Call& call) const {
  return call.kind == CallKind::recompute && (is("recompute_returns_early") || is("recompute_without_done") ||
                                              is("done_before_publish") || is("push_without_entered"));
}
bool Faults::sends_no_done(const Call& call) const {
  return (is("recompute_without_done") && call.kind == CallKind::recompute) ||
         (is("surplus_sends_no_done") && num_rows(call) == 0);
}
void Faults::end_call(const Args& args) {
  if (args.call.kind != CallKind::schedule && !sends_no_done(args.call)) last_done_epoch_ = args.call_epoch;
}

Launch Faults::role_launch(const Launch& launch) const {
  Launch counting = launch;
  if (is("roles_counted_by_call")) counting.launch_idx = 0;
  return counting;
}

void Faults::interleave(std::vector<ModelTask>& tasks, const Call& call) const {
  const int32 ring_blocks = call.shape.ring_rows / call.shape.row_block();
  const auto step = [&](const ModelTask& task) {
    if (!is_windowed(task.stage)) return std::pair(-1, 0);
    const int32 macrobatch = task.block / ring_blocks;
    const int32 generation = call.kind == CallKind::forward ? num_generations(call) - 1 - macrobatch : macrobatch;
    return std::pair(generation * ring_blocks + task.block % ring_blocks + window_lag(task.stage),
                     static_cast<int>(task.stage));
  };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&](const ModelTask& a, const ModelTask& b) { return step(a) < step(b); });
}

void Faults::move_wgrad(std::vector<Kernel>& kernels) const {
  Kernel* to = nullptr;
  for (Kernel& kernel : kernels) {
    if (kernel.tasks.empty()) continue;
    if (kernel.tasks.front().stage == Stage::down_dgrad) to = &kernel;
    if (kernel.tasks.front().stage != Stage::wgrad || !to) continue;
    to->tasks.insert(to->tasks.end(), kernel.tasks.begin(), kernel.tasks.end());
    kernel.tasks.clear();
  }
}

}  // namespace mok::explore
