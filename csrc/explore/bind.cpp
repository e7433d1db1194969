// The explorer for Python: one search a call, without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "explore/model.h"
#include "protocol/roster.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mok::host {
void bind_explore(nb::module_& m);

namespace {

// A launch as Python gives it: (name in csrc/explore/model.h, value) by name.
mok_explore::LaunchRow launch_row(const nb::dict& d) {
  mok_explore::LaunchRow row;
  row.group = nb::cast<unsigned>(d["group"]);
  row.stage = nb::cast<std::string>(d["stage"]);
  row.generation = nb::cast<int>(d["generation"]);
  row.has_prologue = nb::cast<bool>(d["has_prologue"]);
  row.is_last_group = nb::cast<bool>(d["is_last_group"]);
  row.has_experts_in_turn = nb::cast<bool>(d["has_experts_in_turn"]);
  row.num_comm_ctas = nb::cast<int>(d["num_comm_ctas"]);
  row.stream = nb::cast<int>(d["stream"]);
  row.is_join = nb::cast<bool>(d["is_join"]);
  row.has_roles = nb::cast<bool>(d["has_roles"]);
  return row;
}

mok_explore::Workers workers_by_name(const std::string& name) {
  constexpr std::array kNames{"one", "streams", "tasks", "ctas"};
  for (std::size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return static_cast<mok_explore::Workers>(i);
  throw nb::value_error(("workers are one, streams, tasks or ctas, got '" + name + "'").c_str());
}

// `launches`: by the letter of a call, a dict each.
nb::dict explore(const std::string& sequence, const nb::dict& launches, int ring_blocks,
                 const std::vector<std::vector<int>>& experts,
                 const std::vector<std::vector<std::vector<int>>>& sources, const std::string& workers,
                 bool is_push_dispatch, bool is_pull_combine, bool is_pull_once, bool is_mxfp8, bool is_zero_copy,
                 const std::string& fault, bool is_expiry_allowed, bool is_reduced, long long max_states) {
  mok_explore::Setup setup;
  setup.sequence = sequence;
  setup.num_ranks = static_cast<int>(experts.size());
  for (const auto& [kind, rows] : launches)
    for (const nb::handle row : rows)
      setup.launches[nb::cast<std::string>(kind).at(0)].push_back(launch_row(nb::cast<nb::dict>(row)));
  setup.ring_blocks = ring_blocks;
  setup.experts = experts;
  setup.sources = sources;
  setup.workers = workers_by_name(workers);
  setup.is_push_dispatch = is_push_dispatch;
  setup.is_pull_combine = is_pull_combine;
  setup.is_pull_once = is_pull_once;
  setup.is_mxfp8 = is_mxfp8;
  setup.is_zero_copy = is_zero_copy;
  setup.fault = fault;
  setup.is_expiry_allowed = is_expiry_allowed;
  mok_explore::Verdict verdict;
  std::size_t num_processes = 0;
  unsigned long long used_edges = 0;
  {
    const nb::gil_scoped_release release;
    const mok_explore::Model model = mok_explore::make_model(setup);
    num_processes = model.processes.size();
    used_edges = model.used_edges;
    verdict = mok_explore::search(model, is_expiry_allowed, is_reduced, max_states);
  }
  nb::dict out;
  out["is_ok"] = verdict.is_ok;
  out["is_complete"] = verdict.is_complete;
  out["num_states"] = verdict.num_states;
  out["num_steps"] = verdict.num_steps;
  out["num_processes"] = num_processes;
  out["violation"] = verdict.violation;
  nb::list story;
  for (const mok_explore::Event& event : verdict.story)
    story.append(nb::make_tuple(event.rank, event.call, event.task, event.text));
  out["story"] = story;
  std::vector<std::string> edges;
  for (int i = 0; i < kNumEdges; ++i)
    if (used_edges >> i & 1) edges.push_back(edge_name(static_cast<Edge>(i)));
  out["edges"] = nb::cast(edges);
  return out;
}

}  // namespace

void bind_explore(nb::module_& m) {
  m.def("explore", &explore, "sequence"_a, "launches"_a, "ring_blocks"_a, "experts"_a, "sources"_a, "workers"_a,
        "is_push_dispatch"_a, "is_pull_combine"_a, "is_pull_once"_a, "is_mxfp8"_a, "is_zero_copy"_a, "fault"_a,
        "is_expiry_allowed"_a, "is_reduced"_a, "max_states"_a);
  m.def("protocol_faults", &mok_explore::fault_names);
}

}  // namespace mok::host

#ifdef MOK_EXPLORE_ALONE
NB_MODULE(_explore, m) { mok::host::bind_explore(m); }
#endif
