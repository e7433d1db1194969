// The explorer for Python: one search a call, without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "explore/model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mok::host {
void bind_explore(nb::module_& m);

namespace {

nb::dict explore(const std::string& sequence, const std::vector<unsigned>& groups, int ring_blocks,
                 const std::vector<std::vector<int>>& experts,
                 const std::vector<std::vector<std::vector<int>>>& sources, const std::string& workers,
                 bool is_push_dispatch, bool is_pull_combine, bool is_pull_once, bool is_mxfp8, bool is_zero_copy,
                 const std::string& fault, bool is_expiry_allowed, bool is_reduced, long long max_states) {
  explore::Setup setup;
  setup.sequence = sequence;
  setup.num_ranks = static_cast<int>(experts.size());
  setup.groups.assign(groups.begin(), groups.end());
  setup.ring_blocks = ring_blocks;
  setup.experts = experts;
  setup.sources = sources;
  setup.workers = workers == "one"       ? explore::Workers::one
                  : workers == "streams" ? explore::Workers::streams
                                         : explore::Workers::tasks;
  setup.is_push_dispatch = is_push_dispatch;
  setup.is_pull_combine = is_pull_combine;
  setup.is_pull_once = is_pull_once;
  setup.is_mxfp8 = is_mxfp8;
  setup.is_zero_copy = is_zero_copy;
  setup.fault = fault;
  setup.is_expiry_allowed = is_expiry_allowed;
  explore::Verdict verdict;
  std::size_t num_processes = 0;
  unsigned long long used_edges = 0;
  {
    const nb::gil_scoped_release release;
    const explore::Model model = explore::make_model(setup);
    num_processes = model.processes.size();
    used_edges = model.used_edges;
    verdict = explore::search(model, is_expiry_allowed, is_reduced, max_states);
  }
  nb::dict out;
  out["is_ok"] = verdict.is_ok;
  out["is_complete"] = verdict.is_complete;
  out["num_states"] = verdict.num_states;
  out["num_steps"] = verdict.num_steps;
  out["num_processes"] = num_processes;
  out["violation"] = verdict.violation;
  nb::list story;
  for (const explore::Event& event : verdict.story)
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
  m.def("explore", &explore, "sequence"_a, "groups"_a, "ring_blocks"_a, "experts"_a, "sources"_a, "workers"_a,
        "is_push_dispatch"_a, "is_pull_combine"_a, "is_pull_once"_a, "is_mxfp8"_a, "is_zero_copy"_a, "fault"_a,
        "is_expiry_allowed"_a, "is_reduced"_a, "max_states"_a);
  m.def("protocol_faults", &explore::fault_names);
}

}  // namespace mok::host
