// The Python module mok_modular._host: workspaces in host memory, and one function that runs a call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "targets/host/gemm.h"
#include "targets/host/kernels.h"
#include "targets/host/workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mok::host {
void bind_cuda(nb::module_& m);
void bind_mxfp8(nb::module_& m);
void bind_roster(nb::module_& m);
void bind_explore(nb::module_& m);
// Only where stage code is compiled for the happens-before checker.
void start_happens_before();
std::vector<std::string> happens_before_races(long long* num_races, long long* num_accesses, long long* num_releases);
}  // namespace mok::host

namespace mok::kernels {
void ring_block(const Call& call, int32 block, int32* table);
}

namespace mok::host {
namespace {

using Pointers = std::map<std::string, std::uintptr_t>;

template <class T>
T* take(const Pointers& pointers, const char* name) {
  const auto found = pointers.find(name);
  return found == pointers.end() ? nullptr : reinterpret_cast<T*>(found->second);
}

Schedule make_schedule(const Pointers& p, int32 token_row_stride) {
  Schedule s;
  s.peer_rank = take<int32>(p, "peer_rank");
  s.peer_token_idx = take<int32>(p, "peer_token_idx");
  s.segment_start = take<int32>(p, "segment_start");
  s.segment_num_rows = take<int32>(p, "segment_num_rows");
  s.row_block_expert = take<int32>(p, "row_block_expert");
  s.window_start = take<int32>(p, "window_start");
  s.generation_window = take<int32>(p, "generation_window");
  s.counts = take<int32>(p, "counts");
  s.route_rank = take<int32>(p, "route_rank");
  s.route_row = take<int32>(p, "route_row");
  s.sorted_route = take<int32>(p, "sorted_route");
  s.token_row = take<int32>(p, "token_row");
  s.token_row_stride = token_row_stride;
  return s;
}

Tensors make_tensors(const Pointers& p) {
  Tensors t;
  t.x = take<bf16>(p, "x");
  t.router_weights = take<float>(p, "router_weights");
  t.w_shared_gate = take<bf16>(p, "w_shared_gate");
  t.w_shared_up = take<bf16>(p, "w_shared_up");
  t.w_shared_down = take<bf16>(p, "w_shared_down");
  t.w_routed_gate = take<bf16>(p, "w_routed_gate");
  t.w_routed_up = take<bf16>(p, "w_routed_up");
  t.w_routed_down = take<bf16>(p, "w_routed_down");
  t.w_dgrad_gate = take<bf16>(p, "w_dgrad_gate");
  t.w_dgrad_up = take<bf16>(p, "w_dgrad_up");
  t.top_experts = take<int32>(p, "top_experts");
  t.output = take<bf16>(p, "output");
  t.context_x = take<bf16>(p, "context_x");
  t.context_gate = take<bf16>(p, "context_gate");
  t.context_up = take<bf16>(p, "context_up");
  t.context_shared_gate = take<bf16>(p, "context_shared_gate");
  t.context_shared_up = take<bf16>(p, "context_shared_up");
  t.d_output = take<bf16>(p, "d_output");
  t.d_router = take<float>(p, "d_router");
  t.d_weights.mode = p.contains("gradients_fp32")   ? GradientMode::add_fp32
                     : p.contains("gradients_bf16") ? GradientMode::add_bf16
                                                    : GradientMode::store;
  t.d_weights.routed_gate = take<void>(p, "d_routed_gate");
  t.d_weights.routed_up = take<void>(p, "d_routed_up");
  t.d_weights.routed_down = take<void>(p, "d_routed_down");
  t.d_weights.shared_gate = take<void>(p, "d_shared_gate");
  t.d_weights.shared_up = take<void>(p, "d_shared_up");
  t.d_weights.shared_down = take<void>(p, "d_shared_down");
  t.saved_d_y = take<bf16>(p, "saved_d_y");
  t.saved_hidden = take<bf16>(p, "saved_hidden");
  t.saved_d_gate = take<bf16>(p, "saved_d_gate");
  t.saved_d_up = take<bf16>(p, "saved_d_up");
  t.saved_shared_hidden = take<bf16>(p, "saved_shared_hidden");
  t.saved_shared_d_gate = take<bf16>(p, "saved_shared_d_gate");
  t.saved_shared_d_up = take<bf16>(p, "saved_shared_d_up");
  return t;
}

const char* reason_name(Reason reason) {
  constexpr const char* kNames[] = {"ok", "deadlock", "timeout", "mismatch", "interrupted", "surplus", "swapped"};
  return kNames[static_cast<int>(reason)];
}

nb::dict to_dict(const WaitRecord& w) {
  nb::dict d;
  d["rank"] = w.rank;
  d["worker"] = w.worker;
  d["kernel"] = w.kernel;
  d["stage"] = stage_name(w.stage);
  d["block"] = w.block;
  d["part"] = w.part;
  d["edge"] = edge_name(w.edge);
  d["index"] = w.index;
  d["peer"] = w.peer;
  d["have"] = w.have;
  d["want"] = w.want;
  return d;
}

nb::list to_list(const std::vector<KernelStats>& kernels) {
  nb::list rows;
  for (const KernelStats& kernel : kernels) {
    for (int i = 0; i < kNumStages; ++i) {
      const StageStats& s = kernel.stages[i];
      if (!s.busy_ns && !s.wait_ns && !s.num_rows) continue;
      nb::dict row;
      row["name"] = stage_name(static_cast<Stage>(i));
      row["kernel"] = kernel.kernel;
      row["num_rows"] = s.num_rows;
      row["num_bytes"] = s.num_bytes;
      row["flops"] = s.num_flops;
      row["busy_s"] = s.busy_ns * 1e-9;
      row["wait_s"] = s.wait_ns * 1e-9;
      rows.append(row);
    }
  }
  return rows;
}

Edge edge_by_name(const std::string& name) {
  for (int i = 0; i < kNumEdges; ++i)
    if (name == edge_name(static_cast<Edge>(i))) return static_cast<Edge>(i);
  throw nb::value_error(("no edge has the name '" + name + "'").c_str());
}
Stage stage_by_name(const std::string& name) {
  for (int i = 0; i < kNumStages; ++i)
    if (name == stage_name(static_cast<Stage>(i))) return static_cast<Stage>(i);
  throw nb::value_error(("no stage has the name '" + name + "'").c_str());
}

Fault make_fault(const nb::dict& d) {
  Fault fault;
  fault.kind = fault_kind_by_name(nb::cast<std::string>(d["kind"]));
  if (d.contains("edge")) fault.edge = edge_by_name(nb::cast<std::string>(d["edge"]));
  if (d.contains("stage")) fault.stage = stage_by_name(nb::cast<std::string>(d["stage"]));
  fault.rank = nb::cast<int>(d["rank"]);
  fault.dst_rank = nb::cast<int>(d["dst_rank"]);
  fault.index = nb::cast<long long>(d["index"]);
  fault.after = nb::cast<long long>(d["after"]);
  fault.amount = nb::cast<double>(d["amount"]);
  return fault;
}

CallKind call_kind_by_name(const std::string& name) {
  if (name == "schedule") return CallKind::schedule;
  for (const CallKind kind :
       {CallKind::forward, CallKind::recompute, CallKind::backward, CallKind::backward_dgrad, CallKind::backward_wgrad})
    if (name == call_kind_name(kind)) return kind;
  throw nb::value_error(("no call has the name '" + name + "'").c_str());
}

nb::dict run(Workspace& workspace, std::vector<RankProgram*> programs, const std::string& order,
             unsigned long long seed, bool use_threads, double timeout_s, double start_timeout_s,
             const std::vector<std::tuple<std::string, int, int, long long>>& lost_signals, const nb::list& planted,
             bool is_traced, long long trace_begin, long long trace_capacity) {
  Options options;
  if (order != "round_robin" && order != "random" && order != "last_first")
    throw nb::value_error("order must be 'round_robin', 'random' or 'last_first'");
  options.order = order == "random" ? Order::random : order == "last_first" ? Order::last_first : Order::round_robin;
  options.seed = seed;
  options.use_threads = use_threads;
  options.timeout_s = timeout_s;
  options.start_timeout_s = start_timeout_s;
  std::vector<Fault> faults;
  for (const auto& [edge, rank, dst_rank, index] : lost_signals)
    faults.push_back(Fault{Fault::Kind::drop, edge_by_name(edge), Stage::publish, rank, dst_rank, index});
  for (const nb::handle fault : planted) faults.push_back(make_fault(nb::cast<nb::dict>(fault)));
  options.is_traced = is_traced;
  options.trace_begin = trace_begin;
  options.trace_capacity = trace_capacity;
  std::vector<RankProgram> ranks;
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    ranks.push_back(*programs[rank]);
    // The caller's functions are held for this run alone: a failed one can lead back to its program.
    for (LaunchSpec& spec : programs[rank]->launches) spec.swapped = nullptr;
    ranks.back().call.regions = workspace.table(static_cast<int>(rank));
    std::copy_n(ranks.back().call.regions + rank * kNumRegions, kNumRegions, ranks.back().call.own);
    ranks.back().call.place_input();
  }
  Result result;
  {
    const nb::gil_scoped_release release;
    const auto runtime = make_runtime(ranks, options, faults);
    workspace.set_runtime(runtime.get());
    try {
      runtime->run();
    } catch (...) {
      workspace.set_runtime(nullptr);
      throw;
    }
    workspace.set_runtime(nullptr);
    result = runtime->take_result();
  }
  nb::dict out;
  nb::list waits, stats;
  for (const WaitRecord& wait : result.waits) waits.append(to_dict(wait));
  for (const auto& rank : result.stats) stats.append(to_list(rank));
  out["reason"] = reason_name(result.reason);
  out["waits"] = waits;
  out["stats"] = stats;
  nb::list held;
  for (const WaitRecord& worker : result.held) held.append(to_dict(worker));
  out["held"] = held;
  out["num_switches"] = result.num_switches;
  if (is_traced) {
    out["trace"] =
        nb::bytes(reinterpret_cast<const char*>(result.trace.data()), result.trace.size() * sizeof(TraceRecord));
    out["num_dropped"] = result.num_dropped;
    nb::list uses;
    for (int stage = 0; stage < kNumStages; ++stage)
      for (int edge = 0; edge < kNumEdges; ++edge) {
        const auto add = [&](const char* what) {
          uses.append(nb::make_tuple(stage_name(static_cast<Stage>(stage)), edge_name(static_cast<Edge>(edge)), what));
        };
        if (result.waited[stage] >> edge & 1) add("wait");
        if (result.published[stage] >> edge & 1) add("publish");
      }
    out["uses"] = uses;
    out["trace_end"] = result.trace_end;
  }
  return out;
}

void bind_shape(nb::module_& m) {
  nb::class_<Shape>(m, "Shape")
      .def(nb::init<>())
      .def_rw("num_ranks", &Shape::num_ranks)
      .def_rw("max_tokens", &Shape::max_tokens)
      .def_rw("topk", &Shape::topk)
      .def_rw("hidden_size", &Shape::hidden_size)
      .def_rw("intermediate_size", &Shape::intermediate_size)
      .def_rw("shared_size", &Shape::shared_size)
      .def_rw("num_local_experts", &Shape::num_local_experts)
      .def_rw("row_block", &Shape::row_block_rows)
      .def_rw("minibatch", &Shape::minibatch)
      .def_rw("capacity_rows", &Shape::capacity_rows)
      .def_rw("ring_rows", &Shape::ring_rows)
      .def_rw("is_push_dispatch", &Shape::is_push_dispatch)
      .def_rw("is_pull_once", &Shape::is_pull_once)
      .def_rw("is_pull_combine", &Shape::is_pull_combine)
      .def_rw("is_minibatch_grain", &Shape::is_minibatch_grain)
      .def_rw("is_serial_ring", &Shape::is_serial_ring)
      .def_rw("has_backward", &Shape::has_backward)
      .def_rw("is_mxfp8", &Shape::has_mxfp8_operands)
      .def_rw("is_mxfp8_wire", &Shape::has_mxfp8_wire)
      .def_prop_ro("num_experts", &Shape::num_experts)
      .def_prop_ro("max_generations", &Shape::max_generations)
      .def_prop_ro("max_windows", &Shape::max_windows)
      .def("region_bytes", [](const Shape& s) {
        std::map<std::string, int64> bytes;
        for (int i = 0; i < kNumRegions; ++i)
          bytes[region_name(static_cast<Region>(i))] = region_bytes(static_cast<Region>(i), s);
        return bytes;
      });
}

void bind_program(nb::module_& m) {
  nb::class_<RankProgram>(m, "Program")
      .def(
          "__init__",
          [](RankProgram* self, const std::string& kind, const Shape& shape, int rank, int num_tokens,
             unsigned fingerprint, const std::vector<unsigned>& groups, const Pointers& schedule,
             const Pointers& tensors, nb::object swiglu_limit, int32 token_row_stride) {
            new (self) RankProgram();
            Call& call = self->call;
            call.kind = call_kind_by_name(kind);
            call.shape = shape;
            call.place_counters();
            call.rank = rank;
            call.num_tokens = num_tokens;
            call.fingerprint = fingerprint;
            for (const unsigned group : groups) call.add_group(group);
            call.schedule = make_schedule(schedule, token_row_stride);
            call.tensors = make_tensors(tensors);
            call.has_swiglu_limit = !swiglu_limit.is_none();
            if (call.has_swiglu_limit) call.swiglu_limit = nb::cast<float>(swiglu_limit);
          },
          "kind"_a, "shape"_a, "rank"_a, "num_tokens"_a, "fingerprint"_a, "groups"_a, "schedule"_a, "tensors"_a,
          "swiglu_limit"_a.none(), "token_row_stride"_a = 0)
      .def(
          "add_launch",
          [](RankProgram& self, const std::string& name, unsigned group, const std::string& stage, int generation,
             bool has_prologue, bool is_last_group, bool is_join, int stream, int num_workers, int num_comm_workers,
             nb::object swapped) {
            LaunchSpec spec;
            spec.name = name;
            spec.launch.group = group;
            if (group == 0) spec.launch.stage = stage_by_name(stage);
            spec.launch.generation = generation;
            spec.launch.has_prologue = has_prologue;
            spec.launch.is_last_group = is_last_group;
            spec.launch.launch_idx = static_cast<int32>(self.launches.size());
            spec.kernel = find_kernel(group, spec.launch.stage);
            if (!spec.kernel || (!swapped.is_none() && count_of(group) > 1))
              throw nb::value_error(("the host target has no kernel '" + name + "'").c_str());
            spec.is_join = is_join;
            spec.stream = stream;
            spec.num_workers = num_workers;
            spec.num_comm_workers = num_comm_workers;
            if (!swapped.is_none())
              spec.swapped = [swapped] {
                const nb::gil_scoped_acquire acquire;
                return nb::cast<bool>(swapped());
              };
            self.launches.push_back(spec);
          },
          "name"_a, "group"_a, "stage"_a, "generation"_a, "has_prologue"_a, "is_last_group"_a, "is_join"_a, "stream"_a,
          "num_workers"_a, "num_comm_workers"_a, "swapped"_a = nb::none());
}

// One grouped GEMM on one core, for benchmarks: rows x cols x k, once.
void gemm(std::uintptr_t a, std::uintptr_t b, std::uintptr_t out, int num_rows, int num_cols, long long k) {
  GemmScratch& scratch = gemm_scratch();
  scratch.accumulators.assign(static_cast<std::size_t>(num_rows) * kDownCols, 0.0f);
  for (int first = 0; first < num_cols; first += kDownCols) {
    const int cols = min_of(kDownCols, num_cols - first);
    std::fill(scratch.accumulators.begin(), scratch.accumulators.end(), 0.0f);
    const MatrixView bs[2] = {{reinterpret_cast<const bf16*>(b) + first * k, k, false}, {}};
    multiply(num_rows, cols, 1, kDownCols, k, {reinterpret_cast<const bf16*>(a), k, false}, bs,
             scratch.accumulators.data(), scratch.a_panel, scratch.b_panel);
    for (int row = 0; row < num_rows; ++row)
      for (int col = 0; col < cols; ++col)
        reinterpret_cast<bf16*>(out)[int64{row} * num_cols + first + col] =
            to_bf16(scratch.accumulators[static_cast<std::size_t>(row) * kDownCols + col]);
  }
}

std::vector<std::tuple<int, int, int, int, int>> ring_table(const Shape& shape, int num_rows) {
  std::vector<int32> counts(kNumCounts, 0), table(static_cast<std::size_t>(num_rows / shape.row_block()) * 5);
  counts[kCountRows] = num_rows;
  Call call;
  call.kind = CallKind::forward;
  call.shape = shape;
  call.schedule.counts = counts.data();
  std::vector<std::tuple<int, int, int, int, int>> out;
  for (int32 block = 0; block < num_rows / shape.row_block(); ++block) {
    kernels::ring_block(call, block, table.data());
    const int32* row = table.data() + 5 * block;
    out.emplace_back(row[0], row[1], row[2], row[3], row[4]);
  }
  return out;
}

}  // namespace

NB_MODULE(_host, m) {
  m.doc() = "The host target: stage code compiled for the CPU, run by fibers or threads.";
  // torch frees no Python object of an autograd graph while the interpreter shuts down, so a graph that is alive at exit,
  // as a global or in the frames of a traceback, keeps its workspace. That is no leak: nanobind's check is for our tests.
  nb::set_leak_warnings(std::getenv("MOK_LEAK_WARNINGS") != nullptr);
  bind_shape(m);
  nb::class_<Workspace>(m, "Workspace")
      .def(nb::init<int>(), "num_ranks"_a)
      .def("reserve", &Workspace::reserve, "shape"_a)
      .def("reset", &Workspace::reset)
      .def(
          "satisfy",
          [](Workspace& self, unsigned fingerprint, const std::string& kind) {
            self.satisfy(fingerprint, call_kind_by_name(kind));
          },
          "fingerprint"_a, "kind"_a = "forward")
      .def("interrupt", &Workspace::interrupt)
      .def("num_bytes", &Workspace::num_bytes)
      .def("epochs", &Workspace::epochs, "rank"_a)
      .def(
          "region_bytes",
          [](const Workspace& self, int rank, const std::string& name) { return self.region(rank, name).second; },
          "rank"_a, "name"_a)
      .def(
          "region",
          [](const Workspace& self, int rank, const std::string& name) {
            auto [data, bytes] = self.region(rank, name);
            const std::size_t shape[] = {bytes};
            using Holder = std::shared_ptr<char[]>;
            const nb::capsule owner(new Holder(self.hold(rank, name)),
                                    [](void* holder) noexcept { delete static_cast<Holder*>(holder); });
            return nb::ndarray<nb::device::cpu, std::uint8_t>(data, 1, shape, owner);
          },
          "rank"_a, "name"_a);
  bind_program(m);
  bind_cuda(m);
  bind_mxfp8(m);
  bind_roster(m);
  bind_explore(m);
  m.def("run", &run, "workspace"_a, "programs"_a, "order"_a, "seed"_a, "use_threads"_a, "timeout_s"_a,
        "start_timeout_s"_a, "lost_signals"_a = std::vector<std::tuple<std::string, int, int, long long>>{},
        "faults"_a = nb::list(), "is_traced"_a = false, "trace_begin"_a = 0, "trace_capacity"_a = 1 << 16);
  m.def("gemm", &gemm, "a"_a, "b"_a, "out"_a, "num_rows"_a, "num_cols"_a, "k"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("ring_table", &ring_table, "shape"_a, "num_rows"_a,
        "One row a block: (macrobatch, first ring row, slot, macrobatch that must have freed the slot or -1, row "
        "blocks that the macrobatch has in the slot).");
  m.def("worst_case_rows", &worst_case_rows, "num_routes"_a, "num_local_experts"_a, "row_block"_a);
  m.def("num_counts", [] { return static_cast<int>(kNumCounts); });
#ifdef MOK_CHECKED
  m.def("start_happens_before", &start_happens_before);
  m.def("happens_before_races", [] {
    long long num_races, num_accesses, num_releases;
    const std::vector<std::string> races = happens_before_races(&num_races, &num_accesses, &num_releases);
    return std::make_tuple(races, num_races, num_accesses, num_releases);
  });
#endif
  m.def("build_info", [] {
    std::map<std::string, std::string> info;
    info["compiler"] = MOK_COMPILER;
    info["flags"] = MOK_FLAGS;
    info["hash"] = MOK_SOURCE_HASH;
    return info;
  });
}

}  // namespace mok::host
