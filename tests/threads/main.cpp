// Schedule, forward and backward of several ranks on the thread executor, for the thread sanitizer: without an
// interpreter, whose own threads it would have to know.
//
//   mok_threads [SEEDS] [RANKS]    prints a line a seed; 0 if every call ended
// Each seed has a routing, a number of workers and a plan of its own (in turn: one kernel a stage, one for all), and a
// ring that is used several times.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "targets/host/kernels.h"
#include "targets/host/workspace.h"

namespace mok::host {
namespace {

constexpr int kTokens = 40, kTopk = 3, kHidden = 64, kInner = 64, kShared = 64, kLocalExperts = 1, kRowBlock = 128;

struct Rank {
  int num_tokens = 0;
  std::map<std::string, std::vector<int32>> tables;
  std::map<std::string, std::vector<bf16>> tensors;
  std::map<std::string, std::vector<float>> floats;
};

class Program {
 public:
  Program(int num_ranks, unsigned seed)
      : ranks_(static_cast<std::size_t>(num_ranks)), workspace_(num_ranks), random_(seed) {
    shape_.num_ranks = num_ranks;
    shape_.max_tokens = kTokens;
    shape_.topk = kTopk;
    shape_.hidden_size = kHidden;
    shape_.intermediate_size = kInner;
    shape_.shared_size = kShared;
    shape_.num_local_experts = kLocalExperts;
    shape_.row_block_rows = shape_.minibatch = kRowBlock;
    shape_.capacity_rows =
        static_cast<int32>(worst_case_rows(int64{num_ranks} * kTokens * kTopk, kLocalExperts, kRowBlock));
    shape_.ring_rows = kRowBlock;
    shape_.has_backward = true;
    workspace_.reserve(shape_);
    is_one_kernel_ = seed % 2 == 1;
    num_workers_ = 2 + static_cast<int>(seed % 3);
    for (int rank = 0; rank < num_ranks; ++rank) fill(rank, rank == num_ranks - 1 ? 0 : kTokens - 3 * rank);
  }

  // false: a call did not end.
  bool run(CallKind kind) {
    std::vector<RankProgram> programs;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) programs.push_back(program(kind, static_cast<int>(rank)));
    Options options;
    options.use_threads = true;
    options.timeout_s = 120;
    const auto runtime = make_runtime(programs, options, {});
    runtime->run();
    return runtime->take_result().reason == Reason::none;
  }

 private:
  std::vector<bf16> values(std::size_t count) {
    std::vector<bf16> out(count);
    for (bf16& value : out) value = to_bf16(static_cast<float>(random_() % 1000) / 4000.0f - 0.125f);
    return out;
  }
  void fill(int rank, int num_tokens) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    r.num_tokens = num_tokens;
    const auto rows = static_cast<std::size_t>(shape_.capacity_rows), ring = static_cast<std::size_t>(shape_.ring_rows);
    const auto tokens = static_cast<std::size_t>(kTokens);
    for (const char* name : {"x", "d_output", "output"}) r.tensors[name] = values(tokens * kHidden);
    for (const char* name : {"gate", "up", "down"}) {
      for (const char* kind : {"w_routed_", "d_routed_"})
        r.tensors[std::string(kind) + name] = values(std::size_t{kLocalExperts} * kInner * kHidden);
      for (const char* kind : {"w_shared_", "d_shared_"})
        r.tensors[std::string(kind) + name] = values(std::size_t{kShared} * kHidden);
    }
    r.tensors["context_x"] = values(ring * kHidden);
    for (const char* name : {"context_gate", "context_up"}) r.tensors[name] = values(ring * kInner);
    for (const char* name : {"context_shared_gate", "context_shared_up"}) r.tensors[name] = values(tokens * kShared);
    for (const char* name : {"router_weights", "d_router"}) r.floats[name].assign(tokens * kTopk, 0.25f);
    for (const char* name : {"peer_rank", "peer_token_idx"}) r.tables[name].resize(rows);
    for (const char* name : {"route_rank", "route_row", "sorted_route", "top_experts"})
      r.tables[name].resize(tokens * kTopk);
    for (int32& id : r.tables["top_experts"]) id = static_cast<int32>(random_() % (ranks_.size() + 1)) - 1;
    r.tables["segment_start"].resize(kLocalExperts + 1);
    r.tables["segment_num_rows"].resize(kLocalExperts);
    r.tables["row_block_expert"].resize(rows / kRowBlock);
    r.tables["window_start"].resize(static_cast<std::size_t>(shape_.max_windows() + 1));
    r.tables["generation_window"].resize(static_cast<std::size_t>(shape_.max_generations() + 1));
    r.tables["counts"].resize(kNumCounts);
  }

  RankProgram program(CallKind kind, int rank) {
    Rank& r = ranks_[static_cast<std::size_t>(rank)];
    RankProgram out;
    Call& call = out.call;
    call.kind = kind;
    call.shape = shape_;
    call.place_counters();
    call.rank = rank;
    call.num_tokens = r.num_tokens;
    call.regions = workspace_.table(rank);
    std::copy_n(call.regions + rank * kNumRegions, kNumRegions, call.own);
    const auto table = [&](const char* name) { return r.tables[name].data(); };
    call.schedule = Schedule{table("peer_rank"),         table("peer_token_idx"),   table("segment_start"),
                             table("segment_num_rows"),  table("row_block_expert"), table("window_start"),
                             table("generation_window"), table("counts"),           table("route_rank"),
                             table("route_row"),         table("sorted_route"),     nullptr};
    Tensors& t = call.tensors;
    const auto tensor = [&](const char* name) { return r.tensors[name].data(); };
    t.x = tensor("x");
    t.router_weights = r.floats["router_weights"].data();
    t.w_shared_gate = tensor("w_shared_gate");
    t.w_shared_up = tensor("w_shared_up");
    t.w_shared_down = tensor("w_shared_down");
    t.w_routed_gate = tensor("w_routed_gate");
    t.w_routed_up = tensor("w_routed_up");
    t.w_routed_down = tensor("w_routed_down");
    t.top_experts = table("top_experts");
    t.output = tensor("output");
    t.context_x = tensor("context_x");
    t.context_gate = tensor("context_gate");
    t.context_up = tensor("context_up");
    t.context_shared_gate = tensor("context_shared_gate");
    t.context_shared_up = tensor("context_shared_up");
    if (kind == CallKind::backward) {
      t.d_output = tensor("d_output");
      t.d_router = r.floats["d_router"].data();
      t.d_weights.routed_gate = tensor("d_routed_gate");
      t.d_weights.routed_up = tensor("d_routed_up");
      t.d_weights.routed_down = tensor("d_routed_down");
      t.d_weights.shared_gate = tensor("d_shared_gate");
      t.d_weights.shared_up = tensor("d_shared_up");
      t.d_weights.shared_down = tensor("d_shared_down");
    }
    add_launches(out, kind);
    return out;
  }

  void add_launches(RankProgram& out, CallKind kind) {
    const bool is_backward = kind == CallKind::backward;
    if (kind == CallKind::schedule) return add(out, 0, Stage::schedule, -1);
    if (is_one_kernel_) {
      add(out, is_backward ? kWholeBackward : kWholeForward, Stage::publish, -1);
    } else {
      add(out, 0, Stage::publish, -1);
      const std::vector<Stage> shared =
          is_backward ? std::vector{Stage::shared_down_dgrad, Stage::shared_gate_up_dgrad, Stage::shared_wgrad}
                      : std::vector{Stage::shared_gate_up, Stage::shared_down};
      for (const Stage stage : shared) add(out, 0, stage, -1);
      for (int generation = 0; generation < shape_.max_generations(); ++generation) {
        std::vector<Stage> stages{Stage::dispatch, Stage::gate_up, Stage::swiglu, Stage::down, Stage::combine};
        if (is_backward) {
          stages.resize(generation > 0 ? 2 : 0);
          for (const Stage stage : {Stage::reverse_combine, Stage::down_dgrad, Stage::swiglu_backward,
                                    Stage::gate_up_dgrad, Stage::reverse_dispatch, Stage::wgrad})
            stages.push_back(stage);
        }
        for (const Stage stage : stages) add(out, group_bit(stage), stage, generation);
      }
    }
    // The last kernel that reaches another rank says done.
    for (std::size_t i = out.launches.size(); i-- > 0;) {
      const Group group = out.launches[i].launch.group;
      if (!holds(group, Stage::combine) && !holds(group, Stage::reverse_dispatch)) continue;
      out.launches[i].launch.is_last_group = true;
      break;
    }
    add(out, 0, Stage::reduce, -1);
    for (LaunchSpec& spec : out.launches)
      for (int i = 0; i < kNumWindowed; ++i)
        if (spec.launch.group >> i & 1u) out.call.groups[i] = spec.launch.group;
  }

  void add(RankProgram& out, Group group, Stage stage, int generation) {
    LaunchSpec spec;
    const bool is_whole = group == kWholeForward || group == kWholeBackward;
    spec.name = is_whole ? "all" : stage_name(stage);
    spec.launch.group = group;
    spec.launch.stage = stage;
    spec.launch.generation = generation;
    spec.launch.has_prologue = is_whole;
    spec.launch.launch_idx = static_cast<int32>(out.launches.size());
    spec.kernel = find_kernel(group, stage);
    if (!spec.kernel) {
      std::fprintf(stderr, "no kernel %s\n", spec.name.c_str());
      std::exit(2);
    }
    const bool is_copy = stage == Stage::publish || stage == Stage::dispatch || stage == Stage::combine ||
                         stage == Stage::reverse_combine || stage == Stage::reverse_dispatch;
    spec.stream = is_copy && !is_whole ? 0 : 1;
    spec.is_join = stage == Stage::reduce;
    spec.num_workers = num_workers_;
    spec.num_comm_workers = is_whole ? num_workers_ / 2 : 0;
    out.launches.push_back(spec);
  }

  std::vector<Rank> ranks_;
  Workspace workspace_;
  std::mt19937 random_;
  Shape shape_;
  bool is_one_kernel_ = false;
  int num_workers_ = 2;
};

}  // namespace
}  // namespace mok::host

int main(int argc, char** argv) {
  const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 20, num_ranks = argc > 2 ? std::atoi(argv[2]) : 4;
  for (int seed = 0; seed < num_seeds; ++seed) {
    mok::host::Program program(num_ranks, static_cast<unsigned>(seed));
    for (const mok::CallKind kind :
         {mok::CallKind::schedule, mok::CallKind::forward, mok::CallKind::forward, mok::CallKind::schedule,
          mok::CallKind::forward, mok::CallKind::backward, mok::CallKind::backward})
      if (!program.run(kind)) {
        std::printf("seed %d: %s did not end\n", seed, mok::call_kind_name(kind));
        return 1;
      }
    std::printf("seed %d: ok\n", seed);
    std::fflush(stdout);
  }
  return 0;
}
