// Skeletons of calls, task by task: the waits, accesses and signals of csrc/stages/ without their arithmetic. Waits and
// signals go through `wait` and `signal`, which refuse what the edge table does not have.
//
// One row block a slot, one row of every source in it, two column tiles a product, one copy task a block.
#include <algorithm>
#include <map>
#include <stdexcept>

#include "explore/model.h"
#include "protocol/edge_table.h"
#include "protocol/ring.h"

namespace mok::explore {

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
          "copies_without_x_ready"};
}

namespace {

constexpr int kTiles = 2;
constexpr int kEpochAfterReset = 20;
struct SkeletonTask {
  Stage stage;
  int name;
  std::vector<Action> actions;
};

struct Kernel {
  std::vector<SkeletonTask> tasks;  // in the order of tickets
  int stream = 0;
  bool is_join = false;
  bool sends_done = false;
};

class Builder {
 public:
  explicit Builder(const Setup& setup) : setup_(setup), R_(setup.num_ranks) {
    model_.num_ranks = R_;
    model_.is_careless = fault("writes_after_false_wait");
    is_aborting_ = setup.is_expiry_allowed;
  }

  Model build() {
    std::vector<std::vector<std::vector<Kernel>>> calls;  // [call][rank][kernel]
    for (const char kind : setup_.sequence) {
      if (kind == 'R') {
        calls.emplace_back();
        begin_after_reset();
        continue;
      }
      if (kind == 'S')
        ++schedule_epoch_;
      else
        ++epoch_;
      ++call_;
      std::vector<std::vector<Kernel>> ranks;
      for (rank_ = 0; rank_ < R_; ++rank_) ranks.push_back(kernels_of(kind));
      if (kind != 'S' && !(kind == 'C' && fault("recompute_without_done"))) last_done_epoch_ = epoch_;
      calls.push_back(std::move(ranks));
    }
    place(calls);
    return std::move(model_);
  }

 private:
  bool fault(const char* name) const { return setup_.fault == name; }

  // ---- names ----
  int word(const std::string& name) { return number(name, word_ids_, model_.words, model_.initial_words); }
  int cell(const std::string& name) { return number(name, cell_ids_, model_.cells, model_.initial_cells); }
  static int number(const std::string& name, std::map<std::string, int>& ids, std::vector<std::string>& names,
                    std::vector<int>& initial) {
    const auto [found, is_new] = ids.try_emplace(name, static_cast<int>(names.size()));
    if (is_new) {
      names.push_back(name);
      initial.push_back(0);
    }
    return found->second;
  }
  static std::string at(const std::string& name, int a, int b = -1, int c = -1) {
    std::string text = name + "[" + std::to_string(a);
    if (b >= 0) text += "," + std::to_string(b);
    if (c >= 0) text += "," + std::to_string(c);
    return text + "]";
  }
  std::string here(const std::string& name) const { return name + " of rank " + std::to_string(rank_); }
  std::string of(const std::string& name, int rank) const { return name + " of rank " + std::to_string(rank); }
  // Counters have banks that are cleared: here each call has its own.
  int counter(Edge edge, int index) {
    return word(here(at(edge_name(edge), index)) + ", call " + std::to_string(call_));
  }
  int rank_word(Edge edge, int src, int at_rank, int epoch) {
    std::string name = std::string(edge_name(edge)) + "[" + std::to_string(src) + "]";
    if (edge == Edge::done && !fault("done_without_parity")) name += epoch & 1 ? " odd" : " even";
    if (edge == Edge::entered) name += call_ & 1 ? " odd" : " even";
    return word(of(name, at_rank));
  }

  // ---- a task ----
  void begin(Stage stage, const std::string& text) {
    model_.tasks.push_back(TaskName{rank_, call_, text});
    task_ = SkeletonTask{stage, static_cast<int>(model_.tasks.size()) - 1, {}};
  }
  SkeletonTask end() { return std::move(task_); }
  void act(Op op, int object, int value, int skip = 0) {
    task_.actions.push_back(Action{op, object, value, skip, task_.name});
  }
  void check(bool is_in_table, Edge edge, const char* what) const {
    if (!is_in_table)
      throw std::logic_error(std::string(stage_name(task_.stage)) + " " + what + " " + edge_name(edge) +
                             ": not in the edge table");
  }
  void wait(Edge edge, int index, int want) {
    check(waits_for(task_.stage, edge), edge, "waits for");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    act(Op::wait, counter(edge, index), want);
  }
  void wait_rank(Edge edge, int src, int epoch) {
    check(waits_for(task_.stage, edge), edge, "waits for");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    act(edge == Edge::done ? Op::wait_exact : Op::wait, rank_word(edge, src, rank_, epoch), epoch);
  }
  void signal(Edge edge, int index, int count = 1) {
    check(writes(task_.stage, edge), edge, "signals");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    if (fault("lost_signal") && edge == Edge::x_ready && !is_lost_) {
      is_lost_ = true;
      return;
    }
    act(Op::add, counter(edge, index), count);
  }
  void signal_ranks(Edge edge, int epoch) {
    check(writes(task_.stage, edge), edge, "signals");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    for (int dst = 0; dst < R_; ++dst) act(Op::set, rank_word(edge, rank_, dst, epoch), epoch);
  }
  void wait_arrival(Edge edge, int block, int src) {
    check(waits_for(task_.stage, edge), edge, "waits for");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    act(Op::wait, word(here(at(edge_name(edge), block, src))), epoch_);
  }
  void signal_arrival(Edge edge, int block, int dst) {
    check(writes(task_.stage, edge), edge, "signals");
    model_.used_edges |= std::uint64_t{1} << static_cast<int>(edge);
    act(Op::set, word(of(at(edge_name(edge), block, rank_), dst)), epoch_);
  }
  void read(const std::string& name, int version) { act(Op::read, cell(name), version); }
  void write(const std::string& name, int version) { act(Op::write, cell(name), version); }

  // ---- rows ----
  int num_blocks(int rank) const { return static_cast<int>(setup_.experts[static_cast<std::size_t>(rank)].size()); }
  int num_blocks() const { return num_blocks(rank_); }
  int num_generations() const { return (num_blocks() + setup_.ring_blocks - 1) / setup_.ring_blocks; }
  int expert(int block) const {
    return setup_.experts[static_cast<std::size_t>(rank_)][static_cast<std::size_t>(block)];
  }
  const std::vector<int>& sources(int rank, int block) const {
    return setup_.sources[static_cast<std::size_t>(rank)][static_cast<std::size_t>(block)];
  }
  int macrobatch(int block) const { return block / setup_.ring_blocks; }
  int place_of(int block) const { return block % setup_.ring_blocks; }
  int slot(int m, int s) const { return m * setup_.ring_blocks + s; }
  int max_generations() const {
    int most = 1;
    for (int rank = 0; rank < R_; ++rank)
      most = std::max(most, (num_blocks(rank) + setup_.ring_blocks - 1) / setup_.ring_blocks);
    return most;
  }
  // What call n makes of row block b: no two are the same.
  int version(int block = kWholeVersion) const { return version_of(call_, block); }
  int version_of(int call, int block) const { return call * kVersionsOfCall + block + 1; }

  bool share(Stage a, Stage b) const {
    for (const Group group : setup_.groups)
      if (holds(group, a) && holds(group, b)) return true;
    return false;
  }
  bool swiglu_in_gate_up() const { return share(Stage::gate_up, Stage::swiglu); }
  bool combine_in_down() const { return share(Stage::down, Stage::combine) && !setup_.is_pull_combine; }
  // The backward mirrors the plan.
  bool swiglu_backward_in_down_dgrad() const { return share(Stage::swiglu, Stage::down); }
  bool reverse_dispatch_in_gate_up_dgrad() const { return share(Stage::dispatch, Stage::gate_up); }

  // Ring cells of this rank; macrobatch 0's x, gate and up are in the context of the call that the backward belongs to.
  std::string ring(const char* region, int block, int tile = -1) const {
    return here(at(std::string("ring_") + region, place_of(block), tile));
  }
  std::string kept(const char* region, int block, int call, int tile = -1) const {
    if (macrobatch(block) != 0 || call < 0) return ring(region, block, tile);
    return here(at("context of call " + std::to_string(call) + ": " + region, place_of(block), tile));
  }

  // ---- stages ----
  SkeletonTask publish(bool is_backward) {
    begin(Stage::publish, "publish");
    const bool is_caller_writing = setup_.is_zero_copy && !is_backward;
    if (is_caller_writing) write(here("x"), version());  // by the caller, before the call
    signal_ranks(Edge::entered, call_);
    for (int src = 0; src < R_; ++src) wait_rank(Edge::done, src, last_done_epoch_);
    if (!is_caller_writing) write(here("x"), version());
    if (is_backward) write(here("d_output"), version());
    signal(Edge::published, 0);
    signal_ranks(Edge::input_ready, epoch_);
    return end();
  }
  void wait_slot_free(int block, bool is_backward) {
    const int m = macrobatch(block), s = place_of(block);
    if (is_backward) {
      // Of the macrobatch before, which is a full one: its row block's and its expert's weight gradient.
      if (m > 0) wait(Edge::slot_free, slot(m - 1, s), (reverse_dispatch_in_gate_up_dgrad() ? kTiles : 1) + 1);
      return;
    }
    if (m == 0 && fault("macrobatch_0_does_not_wait")) return;
    const int before = (m + 1) * setup_.ring_blocks + s, frees = combine_in_down() ? kTiles : 1;
    const bool is_used = fault("ring_counts_generations") ? m + 1 < num_generations() : before < num_blocks();
    if (is_used) wait(Edge::slot_free, slot(m + 1, s), frees);
  }
  SkeletonTask dispatch(int block, bool is_replay, int context) {
    begin(Stage::dispatch, at(is_replay ? "replayed dispatch" : "dispatch", block));
    if (!(is_replay && fault("replay_does_not_wait")) && !is_recomputing_) wait_slot_free(block, is_replay);
    for (const int src : sources(rank_, block)) wait_rank(Edge::input_ready, src, epoch_);
    for (const int src : sources(rank_, block)) {
      const int first = first_block_of(src);
      if (!setup_.is_pull_once || src == rank_ || first == block) {
        read(of("x", src), version());
        continue;
      }
      if (!fault("copies_without_x_ready")) wait(Edge::x_ready, first, 1);
      read(kept("x", first, context), version(first));
    }
    write(kept("x", block, context), version(block));
    signal(Edge::x_ready, block);
    return end();
  }
  // The first row block of this rank with rows of a source.
  int first_block_of(int src) const {
    for (int block = 0;; ++block)
      for (const int other : sources(rank_, block))
        if (other == src) return block;
  }
  // All routes of this rank into one block of another.
  SkeletonTask push_dispatch(int owner, int block) {
    begin(Stage::dispatch, at("push dispatch to rank " + std::to_string(owner), block));
    if (!fault("push_without_entered")) {
      check(waits_for(Stage::dispatch, Edge::entered), Edge::entered, "waits for");
      act(Op::wait, rank_word(Edge::entered, owner, rank_, 0), call_);
    }
    write(of(at("ring_x", block, rank_), owner), version(block));
    signal(Edge::pushed, owner * 16 + block);
    signal_arrival(Edge::x_arrived, block, owner);
    return end();
  }
  SkeletonTask gate_up(int block, int tile, bool is_replay, int context) {
    begin(Stage::gate_up, at(is_replay ? "replayed gate_up" : "gate_up", block, tile));
    if (setup_.is_push_dispatch) {
      for (const int src : sources(rank_, block)) wait_arrival(Edge::x_arrived, block, src);
      for (const int src : sources(rank_, block)) read(here(at("ring_x", block, src)), version(block));
    } else {
      wait(Edge::x_ready, block, 1);
      read(kept("x", block, context), version(block));
    }
    const bool is_swiglu_here = !is_replay && swiglu_in_gate_up();
    if (is_swiglu_here) write(ring("hidden", block, tile), version(block));
    if (!is_swiglu_here || (context >= 0 && macrobatch(block) == 0))
      write(kept("gate_up", block, context, tile), version(block));
    signal(is_swiglu_here ? Edge::hidden_ready : Edge::gate_up_ready, block);
    return end();
  }
  SkeletonTask swiglu(int block, int context) {
    begin(Stage::swiglu, at("swiglu", block));
    wait(Edge::gate_up_ready, block, kTiles);
    for (int tile = 0; tile < kTiles; ++tile) read(kept("gate_up", block, context, tile), version(block));
    for (int tile = 0; tile < kTiles; ++tile) write(ring("hidden", block, tile), version(block));
    signal(Edge::hidden_ready, block);
    return end();
  }
  void push_row(int block, int tile) {
    for (const int dst : sources(rank_, block)) write(of(at("combine", rank_, block, tile), dst), version(block));
  }
  SkeletonTask down(int block, int tile) {
    begin(Stage::down, at("down", block, tile));
    const bool is_wrong = fault("counts_of_another_plan");
    wait(Edge::hidden_ready, block, swiglu_in_gate_up() != is_wrong ? kTiles : 1);
    for (int t = 0; t < kTiles; ++t) read(ring("hidden", block, t), version(block));
    if (combine_in_down()) {
      push_row(block, tile);
      signal(Edge::slot_free, slot(macrobatch(block), place_of(block)));
    } else {
      write(ring("y", block, tile), version(block));
      signal(Edge::y_ready, block);
      if (setup_.is_pull_combine) {
        check(writes(Stage::down, Edge::y_arrived), Edge::y_arrived, "signals");
        act(Op::arrive, counter(Edge::y_ready, 1000 + block), kTiles, R_);
        for (int dst = 0; dst < R_; ++dst) signal_arrival(Edge::y_arrived, block, dst);
      }
    }
    return end();
  }
  SkeletonTask combine(int block) {
    begin(Stage::combine, at("combine", block));
    wait(Edge::y_ready, block, kTiles);
    for (int tile = 0; tile < kTiles; ++tile) read(ring("y", block, tile), version(block));
    for (int tile = 0; tile < kTiles; ++tile) push_row(block, tile);
    signal(Edge::slot_free, slot(macrobatch(block), place_of(block)));
    return end();
  }
  SkeletonTask pull_combine(int owner, int block) {
    begin(Stage::combine, at("pull combine from rank " + std::to_string(owner), block));
    wait_arrival(Edge::y_arrived, block, owner);
    for (int tile = 0; tile < kTiles; ++tile) read(of(at("ring_y", block, tile), owner), version(block));
    for (int tile = 0; tile < kTiles; ++tile) write(here(at("combine", owner, block, tile)), version(block));
    return end();
  }
  SkeletonTask reverse_combine(int block) {
    begin(Stage::reverse_combine, at("reverse_combine", block));
    if (!fault("reverse_combine_does_not_wait")) wait_slot_free(block, true);
    for (const int src : sources(rank_, block)) wait_rank(Edge::input_ready, src, epoch_);
    for (const int src : sources(rank_, block)) read(of("d_output", src), version());
    write(ring("d_y", block), version(block));
    signal(Edge::d_y_ready, block);
    return end();
  }
  void swiglu_gradients(int block, int tile, int context) {
    const int made = context >= 0 && macrobatch(block) == 0 ? version_of(context, block) : version(block);
    read(kept("gate_up", block, context, tile), made);
    write(ring("d_gate_up", block, tile), version(block));
    write(ring("hidden", block, tile), version(block));
  }
  void wait_replayed(int block) {
    if (macrobatch(block) > 0) wait(Edge::gate_up_ready, block, kTiles);
  }
  void say_d_gate_up_ready(int block) {
    signal(Edge::d_gate_up_ready, block);
    if (!setup_.is_mxfp8) signal(Edge::segment_ready, 100 * macrobatch(block) + expert(block));
  }
  SkeletonTask down_dgrad(int block, int tile, int context) {
    begin(Stage::down_dgrad, at("down_dgrad", block, tile));
    const bool is_swiglu_here = swiglu_backward_in_down_dgrad();
    if (is_swiglu_here) wait_replayed(block);
    wait(Edge::d_y_ready, block, 1);
    read(ring("d_y", block), version(block));
    if (is_swiglu_here) {
      swiglu_gradients(block, tile, context);
      say_d_gate_up_ready(block);
    } else {
      write(ring("d_hidden", block, tile), version(block));
      signal(Edge::d_hidden_ready, block);
    }
    return end();
  }
  SkeletonTask swiglu_backward(int block, int context) {
    begin(Stage::swiglu_backward, at("swiglu_backward", block));
    wait_replayed(block);
    wait(Edge::d_hidden_ready, block, kTiles);
    for (int tile = 0; tile < kTiles; ++tile) {
      read(ring("d_hidden", block, tile), version(block));
      swiglu_gradients(block, tile, context);
    }
    say_d_gate_up_ready(block);
    return end();
  }
  int d_gate_up_arrivals() const { return swiglu_backward_in_down_dgrad() ? kTiles : 1; }
  SkeletonTask gate_up_dgrad(int block, int tile) {
    begin(Stage::gate_up_dgrad, at("gate_up_dgrad", block, tile));
    wait(Edge::d_gate_up_ready, block, d_gate_up_arrivals());
    for (int t = 0; t < kTiles; ++t) read(ring("d_gate_up", block, t), version(block));
    if (reverse_dispatch_in_gate_up_dgrad()) {
      push_row(block, tile);
      signal(Edge::slot_free, slot(macrobatch(block), place_of(block)));
    } else {
      write(ring("d_x", block, tile), version(block));
      signal(Edge::d_x_ready, block);
    }
    return end();
  }
  SkeletonTask reverse_dispatch(int block) {
    begin(Stage::reverse_dispatch, at("reverse_dispatch", block));
    wait(Edge::d_x_ready, block, kTiles);
    for (int tile = 0; tile < kTiles; ++tile) read(ring("d_x", block, tile), version(block));
    for (int tile = 0; tile < kTiles; ++tile) push_row(block, tile);
    signal(Edge::slot_free, slot(macrobatch(block), place_of(block)));
    return end();
  }

  // In place of what nobody reads any more; d_gate and d_up, which gate_up_dgrad may still read, go to gate and up.
  int quantized(int block) const { return version(kQuantizedVersion + block); }
  SkeletonTask quantize(int block, int context) {
    begin(Stage::quantize, at("quantize", block));
    wait(Edge::d_gate_up_ready, block, d_gate_up_arrivals());
    read(kept("x", block, context),
         context >= 0 && macrobatch(block) == 0 ? version_of(context, block) : version(block));
    read(ring("d_y", block), version(block));
    for (int tile = 0; tile < kTiles; ++tile) {
      read(ring("d_gate_up", block, tile), version(block));
      read(ring("hidden", block, tile), version(block));
    }
    write(ring("x", block), quantized(block));
    write(ring("d_y", block), quantized(block));
    for (int tile = 0; tile < kTiles; ++tile) {
      write(ring("gate_up", block, tile), quantized(block));
      write(ring("hidden", block, tile), quantized(block));
    }
    signal(Edge::segment_ready, 100 * macrobatch(block) + expert(block));
    return end();
  }

  // One tile of each expert's weight gradients in a macrobatch.
  std::vector<int> blocks_of(int e, int m) const {
    std::vector<int> blocks;
    for (int block = 0; block < num_blocks(); ++block)
      if (macrobatch(block) == m && expert(block) == e) blocks.push_back(block);
    return blocks;
  }
  bool has_carry_in(int m) const {
    const int first = m * setup_.ring_blocks;
    return m > 0 && first < num_blocks() && expert(first - 1) == expert(first);
  }
  bool is_carried_in(int e, int m) const { return has_carry_in(m) && expert(m * setup_.ring_blocks) == e; }
  bool is_carried_out(int e, int m) const {
    const int next = (m + 1) * setup_.ring_blocks;
    return next < num_blocks() && expert(next) == e && expert(next - 1) == e;
  }
  int carries_of(int m) const {
    const int first = m * setup_.ring_blocks, last = (m + 1) * setup_.ring_blocks - 1;
    return has_carry_in(m) && expert(first) != expert(last) ? 2 : 1;
  }
  SkeletonTask wgrad(int e, int m, int context) {
    begin(Stage::wgrad, at("wgrad", e) + " in macrobatch " + std::to_string(m));
    const std::vector<int> blocks = blocks_of(e, m);
    const int per_block = setup_.is_mxfp8 ? 1 : d_gate_up_arrivals();
    wait(Edge::segment_ready, 100 * m + e, static_cast<int>(blocks.size()) * per_block);
    const bool is_in = is_carried_in(e, m), is_out = is_carried_out(e, m);
    if (is_in)
      wait(Edge::carry_done, m - 1, carries_of(m - 1));
    else if (is_out && has_carry_in(m) && !fault("carry_without_read_edge"))
      wait(Edge::carry_done, m, 1);
    for (const int block : blocks) {
      if (setup_.is_mxfp8) {
        read(ring("x", block), quantized(block));
        read(ring("d_y", block), quantized(block));
        for (int tile = 0; tile < kTiles; ++tile) {
          read(ring("gate_up", block, tile), quantized(block));
          read(ring("hidden", block, tile), quantized(block));
        }
        continue;
      }
      const int made = context >= 0 && m == 0 ? version_of(context, block) : version(block);
      read(kept("x", block, context), made);
      read(ring("d_y", block), version(block));
      for (int tile = 0; tile < kTiles; ++tile) {
        read(ring("d_gate_up", block, tile), version(block));
        read(ring("hidden", block, tile), version(block));
      }
    }
    if (is_in) read(here("carry"), version(kCarryVersion + m - 1));
    if (is_out) write(here("carry"), version(kCarryVersion + m));
    if (is_in || is_out) signal(Edge::carry_done, m);
    for (const int block : blocks) signal(Edge::slot_free, slot(m, place_of(block)));
    return end();
  }

  SkeletonTask shared(Stage stage, Edge wants, Edge gives, const char* from, const char* to) {
    begin(stage, stage_name(stage));
    if (wants != Edge::kCount) wait(wants, 0, 1);
    if (from) read(here(from), version());
    if (to) write(here(to), version());
    if (gives != Edge::kCount) signal(gives, 0);
    return end();
  }

  SkeletonTask reduce(char kind) {
    begin(Stage::reduce, "reduce");
    // Only where the caller writes the input itself must a recomputation wait at its end.
    const bool is_early = fault("recompute_returns_early") || fault("recompute_without_done");
    if (kind == 'C' && (is_early || fault("done_before_publish") || fault("push_without_entered"))) return end();
    for (int src = 0; src < R_; ++src) wait_rank(Edge::done, src, epoch_);
    if (kind == 'C') return end();
    wait(Edge::shared_ready, 0, 1);
    read(here("shared_y"), version());
    for (int owner = 0; owner < R_; ++owner)
      for (int block = 0; block < num_blocks(owner); ++block) {
        const std::vector<int>& from = sources(owner, block);
        if (std::find(from.begin(), from.end(), rank_) == from.end()) continue;
        for (int tile = 0; tile < kTiles; ++tile) read(here(at("combine", owner, block, tile)), version(block));
      }
    act(Op::finish, 0, 0);
    return end();
  }

  // ---- kernels ----
  // The tasks of some stages in a generation, in the order of protocol/tasks.h.
  void add_windows(Kernel& kernel, Group group, const std::vector<int>& windows, char kind, int context) {
    const int num_windows = static_cast<int>(windows.size());
    for (int step = 0; step < num_windows + window_lag(Stage::combine); ++step)
      for (int i = 0; i < kNumWindowed; ++i) {
        const auto stage = static_cast<Stage>(i);
        if (!holds(group, stage)) continue;
        const int window = step - window_lag(stage);
        if (window < 0 || window >= num_windows) continue;
        add_stage(kernel, stage, windows[static_cast<std::size_t>(window)], kind, context);
      }
  }
  void add_stage(Kernel& kernel, Stage stage, int block, char kind, int context) {
    const bool is_backward = kind == 'B';
    if (is_backward && macrobatch(block) == 0 && holds(kReplay, stage)) return;
    auto& tasks = kernel.tasks;
    switch (stage) {
      case Stage::dispatch:
        if (!setup_.is_push_dispatch) tasks.push_back(dispatch(block, is_backward, context));
        break;
      case Stage::gate_up:
        for (int tile = 0; tile < kTiles; ++tile)
          tasks.push_back(gate_up(block, tile, is_backward || kind == 'C', context));
        break;
      case Stage::swiglu:
        if (!swiglu_in_gate_up()) tasks.push_back(swiglu(block, context));
        break;
      case Stage::down:
        for (int tile = 0; tile < kTiles; ++tile) tasks.push_back(down(block, tile));
        break;
      case Stage::combine:
        if (!combine_in_down() && !setup_.is_pull_combine) tasks.push_back(combine(block));
        break;
      case Stage::reverse_combine:
        tasks.push_back(reverse_combine(block));
        break;
      case Stage::down_dgrad:
        for (int tile = 0; tile < kTiles; ++tile) tasks.push_back(down_dgrad(block, tile, context));
        if (fault("wgrad_beside_down_dgrad")) add_wgrad(kernel, block, context);
        break;
      case Stage::swiglu_backward:
        if (!swiglu_backward_in_down_dgrad()) tasks.push_back(swiglu_backward(block, context));
        break;
      case Stage::gate_up_dgrad:
        for (int tile = 0; tile < kTiles; ++tile) tasks.push_back(gate_up_dgrad(block, tile));
        break;
      case Stage::reverse_dispatch:
        if (!reverse_dispatch_in_gate_up_dgrad()) tasks.push_back(reverse_dispatch(block));
        break;
      case Stage::quantize:
        if (setup_.is_mxfp8) tasks.push_back(quantize(block, context));
        break;
      default:
        if (!fault("wgrad_beside_down_dgrad")) add_wgrad(kernel, block, context);
    }
  }
  // With the last row block of the expert in the macrobatch.
  void add_wgrad(Kernel& kernel, int block, int context) {
    const std::vector<int> blocks = blocks_of(expert(block), macrobatch(block));
    if (block == blocks.back()) kernel.tasks.push_back(wgrad(expert(block), macrobatch(block), context));
  }
  std::vector<int> windows_of(int m) const {
    std::vector<int> windows;
    for (int block = 0; block < num_blocks(); ++block)
      if (macrobatch(block) == m) windows.push_back(block);
    return windows;
  }
  int macrobatch_of(int generation, char kind) const {
    return kind == 'F' ? num_generations() - 1 - generation : generation;
  }
  static int stream_of(Group group) { return (group & ~stages_of(Work::copy)) == 0 ? 0 : 1; }
  bool is_one_kernel() const { return setup_.groups.size() == 1; }

  std::vector<Kernel> kernels_of(char kind) {
    if (kind == 'S') return {schedule()};
    is_recomputing_ = kind == 'C';
    if (kind == 'F' || kind == 'C') contexts_[static_cast<std::size_t>(rank_)].push_back(call_);
    // A backward belongs to the latest forward that has none yet; a recomputed context takes its place.
    int context = call_;
    if (kind == 'B') {
      auto& open = contexts_[static_cast<std::size_t>(rank_)];
      if (open.empty()) throw std::invalid_argument("a backward without a forward: " + setup_.sequence);
      context = open.back();
      open.pop_back();
    }
    const bool is_backward = kind == 'B';
    std::vector<Group> groups;
    for (const Group group : setup_.groups) {
      if (kind == 'C' && (group & kReplay)) groups.push_back(group & kReplay);
      if (kind == 'F') groups.push_back(group);
    }
    if (is_backward)
      for (auto group = setup_.groups.rbegin(); group != setup_.groups.rend(); ++group)
        groups.push_back(mirror(*group));

    std::vector<SkeletonTask> prologue;
    prologue.push_back(publish(is_backward));
    if (kind == 'F') {
      prologue.push_back(
          shared(Stage::shared_gate_up, Edge::kCount, Edge::shared_hidden_ready, nullptr, "shared_hidden"));
      prologue.push_back(
          shared(Stage::shared_down, Edge::shared_hidden_ready, Edge::shared_ready, "shared_hidden", "shared_y"));
    } else if (is_backward) {
      prologue.push_back(
          shared(Stage::shared_down_dgrad, Edge::kCount, Edge::shared_d_gate_up_ready, nullptr, "shared_d_gate_up"));
      prologue.push_back(shared(Stage::shared_gate_up_dgrad, Edge::shared_d_gate_up_ready, Edge::shared_ready,
                                "shared_d_gate_up", "shared_y"));
      prologue.push_back(
          shared(Stage::shared_wgrad, Edge::shared_d_gate_up_ready, Edge::kCount, "shared_d_gate_up", nullptr));
    }
    std::vector<Kernel> kernels;
    if (is_one_kernel() && kind != 'C') {
      Kernel kernel;
      kernel.stream = 1;
      kernel.tasks = std::move(prologue);
      add_source_tasks(kernel, Stage::dispatch);
      const Group group = is_backward ? kWholeBackward : kWholeForward;
      std::vector<int> all;
      for (int generation = 0; generation < num_generations(); ++generation) {
        const std::vector<int> windows = windows_of(macrobatch_of(generation, kind));
        all.insert(all.end(), windows.begin(), windows.end());
        if (!fault("order_across_generations")) add_windows(kernel, group, windows, kind, context);
      }
      if (fault("order_across_generations")) add_windows(kernel, group, all, kind, context);
      if (!is_backward) add_source_tasks(kernel, Stage::combine);
      kernel.sends_done = true;
      kernels.push_back(std::move(kernel));
    } else {
      for (SkeletonTask& task : prologue) {
        Kernel kernel;
        kernel.stream = task.stage == Stage::publish ? 0 : 1;
        kernel.tasks.push_back(std::move(task));
        kernels.push_back(std::move(kernel));
      }
      const int launched = kind == 'C' ? 1 : max_generations();
      for (int generation = 0; generation < launched; ++generation) {
        const bool is_surplus = generation >= num_generations();
        std::vector<Group> of_generation = groups;
        if (is_backward) {
          std::vector<Group> replay;
          for (const Group group : setup_.groups)
            if ((group & kReplay) && generation > 0) replay.push_back(group & kReplay);
          of_generation.insert(of_generation.begin(), replay.begin(), replay.end());
          if (setup_.is_mxfp8) of_generation.push_back(group_bit(Stage::quantize));
          of_generation.push_back(group_bit(Stage::wgrad));
        }
        for (const Group group : of_generation) {
          Kernel kernel;
          kernel.stream = stream_of(group);
          if (holds(group, Stage::dispatch) && !is_backward) add_source_tasks(kernel, Stage::dispatch);
          if (!is_surplus) add_windows(kernel, group, windows_of(macrobatch_of(generation, kind)), kind, context);
          if (holds(group, Stage::combine)) add_source_tasks(kernel, Stage::combine);
          kernels.push_back(std::move(kernel));
          const bool reaches_out = holds(group, Stage::reverse_dispatch) || holds(group, Stage::combine) || kind == 'C';
          if (generation + 1 == launched && reaches_out) last_remote_ = static_cast<int>(kernels.size()) - 1;
        }
      }
      kernels[static_cast<std::size_t>(last_remote_)].sends_done = true;
    }
    Kernel last;
    last.stream = 1;
    last.is_join = true;
    last.tasks.push_back(reduce(kind));
    kernels.push_back(std::move(last));
    return kernels;
  }

  // This rank's tasks as a source, where it pushes or pulls.
  void add_source_tasks(Kernel& kernel, Stage stage) {
    if (stage == Stage::dispatch ? !setup_.is_push_dispatch : !setup_.is_pull_combine) return;
    for (int owner = 0; owner < R_; ++owner)
      for (int block = 0; block < num_blocks(owner); ++block) {
        const std::vector<int>& from = sources(owner, block);
        if (std::find(from.begin(), from.end(), rank_) == from.end()) continue;
        kernel.tasks.push_back(stage == Stage::dispatch ? push_dispatch(owner, block) : pull_combine(owner, block));
      }
  }

  Kernel schedule() {
    Kernel kernel;
    const int e = schedule_epoch_, parity = fault("one_id_region") ? 0 : e & 1;
    const auto ids = [&](int dst, int src) { return of(at("ids", parity, src), dst); };
    const auto tokens = [&](int dst, int src) {
      return of(at("num_tokens", fault("tokens_in_topk_word") ? 0 : e & 1, src), dst);
    };
    begin(Stage::schedule, "push of ids");
    signal_ranks(Edge::entered, call_);
    for (int src = 0; src < R_; ++src) wait_rank(Edge::topk_ready, src, e - 1);
    for (int dst = 0; dst < R_; ++dst) {
      write(ids(dst, rank_), version());
      write(tokens(dst, rank_), version());
    }
    signal(Edge::ids_pushed, 0);
    signal_ranks(Edge::topk_ready, e);
    kernel.tasks.push_back(end());
    for (int src = 0; src < R_; ++src) {
      begin(Stage::schedule, at("count of ids", src));
      wait_rank(Edge::topk_ready, src, e);
      read(tokens(rank_, src), version());
      read(ids(rank_, src), version());
      signal(Edge::ids_counted, 0);
      kernel.tasks.push_back(end());
    }
    begin(Stage::schedule, "layout");
    wait(Edge::ids_counted, 0, R_);
    signal(Edge::laid_out, 0);
    kernel.tasks.push_back(end());
    for (int src = 0; src < R_; ++src) {
      begin(Stage::schedule, at("place of ids", src));
      wait(Edge::laid_out, 0, 1);
      read(tokens(rank_, src), version());
      read(ids(rank_, src), version());
      kernel.tasks.push_back(end());
    }
    return kernel;
  }

  // ---- from kernels to processes ----

  void begin_after_reset() {
    // Epochs go on above all others; words that were set keep no trace.
    for (int dst = 0; dst < R_; ++dst) {
      rank_ = dst;
      for (int src = 0; src < R_; ++src) {
        for (int parity = 0; parity < 2; ++parity)
          reset_.emplace_back(rank_word(Edge::done, src, dst, parity),
                              fault("reset_zeroes_done") ? 0 : kEpochAfterReset);
        reset_.emplace_back(rank_word(Edge::topk_ready, src, dst, 0), kEpochAfterReset);
        reset_.emplace_back(rank_word(Edge::input_ready, src, dst, 0), kEpochAfterReset);
      }
    }
    epoch_ = schedule_epoch_ = last_done_epoch_ = kEpochAfterReset;
  }

  void push(Process& process, const Action& action, int exit) {
    process.actions.push_back(action);
    process.exit.push_back(exit);
  }

  // What the last worker out of a kernel does: one action list behind all tasks.
  std::vector<Action> leaving(const Kernel& kernel, int call, int rank, int num_workers, int name, int epoch) {
    std::vector<Action> out;
    if (!kernel.sends_done) return out;
    const bool is_surplus = num_blocks(rank) == 0;
    if (is_surplus && fault("surplus_sends_no_done")) return out;
    rank_ = rank;
    task_ = SkeletonTask{Stage::combine, name, {}};
    const int saved_call = call_;
    call_ = call;
    if (is_aborting_) act(Op::draw, 0, 0);
    const std::size_t begin_at = task_.actions.size();
    act(Op::arrive, counter(Edge::exited, name), num_workers, 0);
    if (!fault("done_before_publish")) wait(Edge::published, 0, 1);
    task_.stage = Stage::publish;
    for (int dst = 0; dst < R_; ++dst) act(Op::set, rank_word(Edge::done, rank, dst, epoch), epoch);
    task_.actions[begin_at].skip = static_cast<int>(task_.actions.size() - begin_at) - 1;
    call_ = saved_call;
    return task_.actions;
  }

  void place(const std::vector<std::vector<std::vector<Kernel>>>& calls) {
    int call = 0, epoch = 0;
    std::vector<std::vector<Process>> lanes(static_cast<std::size_t>(R_));  // by rank: one, or one a stream
    const std::size_t num_lanes = setup_.workers == Workers::one ? 1 : setup_.workers == Workers::streams ? 2 : 0;
    for (int rank = 0; rank < R_; ++rank)
      lanes[static_cast<std::size_t>(rank)].assign(num_lanes, Process{rank, {}, {}});
    Process host{0, {}, {}};
    std::vector<int> ended(static_cast<std::size_t>(R_), -1);     // word: the rank's last call is over
    std::vector<int> num_ended(static_cast<std::size_t>(R_), 0);  // and what it then holds
    int opened = -1;                                              // word: reset is over
    for (std::size_t c = 0; c < calls.size(); ++c) {
      if (calls[c].empty()) {
        for (int rank = 0; rank < R_; ++rank)
          push(host,
               Action{Op::start, ended[static_cast<std::size_t>(rank)], num_ended[static_cast<std::size_t>(rank)]}, 0);
        push(host, Action{Op::reset}, 0);
        opened = word("reset " + std::to_string(c));
        push(host, Action{Op::leave, opened, 1}, 0);
        epoch = kEpochAfterReset;
        continue;
      }
      ++call;
      if (setup_.sequence[c] != 'S') ++epoch;
      for (int rank = 0; rank < R_; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        place_call(calls[c][r], call, epoch, rank, lanes[r], ended[r], num_ended[r], opened,
                   setup_.sequence[c] == 'C' && fault("recompute_without_done"));
      }
    }
    for (auto& rank : lanes)
      for (Process& process : rank) model_.processes.push_back(std::move(process));
    if (!host.actions.empty()) model_.processes.push_back(std::move(host));
    model_.reset_words = reset_;
  }

  void place_call(const std::vector<Kernel>& kernels, int call, int epoch, int rank, std::vector<Process>& lanes,
                  int& ended, int& num_ended, int opened, bool is_silent) {
    const std::string prefix = "launch of rank " + std::to_string(rank) + ", call " + std::to_string(call) + ", ";
    // Words that count who has left a kernel, and how many must.
    std::vector<int> gone, size;
    const auto roles_of = [&](const Kernel& kernel) {
      return setup_.workers == Workers::streams && is_one_kernel() && kernel.tasks.size() > 4 ? 2 : 1;
    };
    for (std::size_t k = 0; k < kernels.size(); ++k) {
      gone.push_back(word(prefix + std::to_string(k)));
      size.push_back(setup_.workers == Workers::tasks ? static_cast<int>(kernels[k].tasks.size()) + 1
                                                      : roles_of(kernels[k]));
    }
    const int saved_call = call_;
    for (std::size_t k = 0; k < kernels.size(); ++k) {
      Kernel kernel = kernels[k];
      if (is_silent) kernel.sends_done = false;
      std::vector<Action> before;
      if (opened >= 0) before.push_back(Action{Op::start, opened, 1});
      if (ended >= 0) before.push_back(Action{Op::start, ended, num_ended});
      for (std::size_t other = 0; other < k; ++other)
        if (kernel.is_join || kernels[other].stream == kernel.stream)
          before.push_back(Action{Op::start, gone[other], size[other]});
      model_.tasks.push_back(TaskName{rank, call, "last worker out"});
      const int name = static_cast<int>(model_.tasks.size()) - 1;
      const Action leave{Op::leave, gone[k], 1, 0, name};
      if (setup_.workers == Workers::tasks) {
        for (const SkeletonTask& task : kernel.tasks) place_task(rank, before, {task}, {}, leave);
        std::vector<Action> all_gone = before;
        all_gone.push_back(Action{Op::start, gone[k], static_cast<int>(kernel.tasks.size())});
        place_task(rank, all_gone, {}, leaving(kernel, call, rank, 1, name, epoch), leave);
      } else if (roles_of(kernel) == 2) {
        for (int role = 0; role < 2; ++role) {
          std::vector<SkeletonTask> mine;
          for (const SkeletonTask& task : kernel.tasks)
            if (is_communication(task.stage) == (role == 0)) mine.push_back(task);
          append(lanes[static_cast<std::size_t>(role)], before, mine, leaving(kernel, call, rank, 2, name, epoch),
                 leave);
        }
      } else {
        Process& lane = lanes[lanes.size() == 1 ? 0 : static_cast<std::size_t>(kernel.stream)];
        append(lane, before, kernel.tasks, leaving(kernel, call, rank, 1, name, epoch), leave);
      }
    }
    call_ = saved_call;
    ended = gone.back();
    num_ended = size.back();
  }
  void place_task(int rank, const std::vector<Action>& before, const std::vector<SkeletonTask>& tasks,
                  const std::vector<Action>& leaving, const Action& leave) {
    Process process{rank, {}, {}};
    append(process, before, tasks, leaving, leave);
    model_.processes.push_back(std::move(process));
  }
  void append(Process& process, const std::vector<Action>& before, const std::vector<SkeletonTask>& tasks,
              const std::vector<Action>& leaving, const Action& leave) {
    const std::size_t begin_at = process.actions.size();
    for (const Action& action : before) push(process, action, 0);
    for (const SkeletonTask& task : tasks) {
      if (is_aborting_) push(process, Action{Op::draw, 0, 0, 0, task.name}, 0);
      for (const Action& action : task.actions) push(process, action, 0);
    }
    for (const Action& action : leaving) push(process, action, 0);
    push(process, leave, 0);
    for (std::size_t i = begin_at; i < process.actions.size(); ++i)
      process.exit[i] = static_cast<int>(process.actions.size()) - 1;
  }

  const Setup& setup_;
  const int R_;
  Model model_;
  std::map<std::string, int> word_ids_, cell_ids_;
  SkeletonTask task_{};
  std::vector<std::pair<int, int>> reset_;
  std::map<std::size_t, std::vector<int>> contexts_;  // by rank: calls whose context no backward has used
  int rank_ = 0, call_ = 0, epoch_ = 0, schedule_epoch_ = 0, last_done_epoch_ = 0, last_remote_ = 0;
  bool is_aborting_ = false, is_recomputing_ = false, is_lost_ = false;
};

}  // namespace

Model make_model(const Setup& setup) {
  const std::vector<std::string> names = fault_names();
  if (!setup.fault.empty() && std::find(names.begin(), names.end(), setup.fault) == names.end())
    throw std::invalid_argument("no fault of the protocol has the name '" + setup.fault + "'");
  if (setup.sequence.find_first_not_of("SFCBR") != std::string::npos)
    throw std::invalid_argument("a sequence is made of S, F, C, B and R, got '" + setup.sequence + "'");
  return Builder(setup).build();
}

}  // namespace mok::explore
