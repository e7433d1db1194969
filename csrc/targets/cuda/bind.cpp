// Kernel arguments for the CUDA targets, as bytes: host and device read the structs of layout.h alike.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "stages/matrices.h"
#include "targets/host/runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mok::host {
namespace {

template <class T>
nb::bytes to_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return nb::bytes(reinterpret_cast<const char*>(&value), sizeof(value));
}

// `tables`: device address of each rank's [R, kNumRegions] table; `own`: its own regions' addresses.
nb::bytes pack_calls(const std::vector<RankProgram*>& programs, const std::vector<std::uintptr_t>& tables,
                     const std::vector<std::vector<std::uintptr_t>>& own, const std::vector<std::uintptr_t>& failures,
                     double timeout_s, double start_timeout_s) {
  if (programs.size() > kMaxLocalRanks) throw nb::value_error("too many ranks on one GPU");
  CallSet set;
  set.num_calls = static_cast<int32>(programs.size());
  for (std::size_t i = 0; i < programs.size(); ++i) {
    Call& call = set.calls[i];
    call = programs[i]->call;
    call.regions = reinterpret_cast<char* const*>(tables[i]);
    for (int region = 0; region < kNumRegions; ++region)
      call.own[region] = reinterpret_cast<char*>(own[i][static_cast<std::size_t>(region)]);
    call.place_input();
    call.failure = reinterpret_cast<Failure*>(failures[i]);
    call.timeout_ns = static_cast<Word>(timeout_s * 1e9);
    call.start_timeout_ns = static_cast<Word>(start_timeout_s * 1e9);
  }
  return to_bytes(set);
}

nb::dict unpack_failure(nb::bytes bytes) {
  Failure f;
  if (bytes.size() < sizeof(f)) throw nb::value_error("too short for a Failure");
  std::memcpy(&f, bytes.c_str(), sizeof(f));
  nb::dict d;
  d["is_set"] = f.is_set == 2;
  constexpr const char* kReasons[] = {"", "timeout", "mismatch", "capacity", "aborted"};
  d["reason"] = kReasons[f.reason];
  d["raised_by"] = f.raised_by;
  d["num_invalid_ids"] = f.num_invalid_ids;
  if (f.reason == kFailureMismatch) {  // both words are `entered` words (protocol/signals.h)
    d["own_call"] = call_kind_name(static_cast<CallKind>(f.want >> 16 & 0xff));
    d["peer_call"] = call_kind_name(static_cast<CallKind>(f.have >> 16 & 0xff));
    d["order"] = f.want >> kEnteredBits;
  }
  d["rank"] = f.rank;
  d["stage"] = stage_name(static_cast<Stage>(f.stage));
  d["block"] = f.block;
  d["part"] = f.part;
  d["edge"] = f.edge < 0 ? "" : edge_name(static_cast<Edge>(f.edge));
  d["index"] = f.index;
  d["peer"] = f.peer;
  d["have"] = f.have;
  d["want"] = f.want;
  return d;
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("pack_calls", &pack_calls, "programs"_a, "tables"_a, "own"_a, "failures"_a, "timeout_s"_a, "start_timeout_s"_a);
  m.def(
      "pack_launch",
      [](const RankProgram& program, std::size_t index, int num_comm_ctas, bool has_experts_in_turn) {
        Launch launch = program.launches.at(index).launch;
        launch.num_comm_ctas = num_comm_ctas;
        launch.has_experts_in_turn = has_experts_in_turn;
        return to_bytes(launch);
      },
      "program"_a, "index"_a, "num_comm_ctas"_a = 0, "has_experts_in_turn"_a = false);
  m.def("forward_matrices", [] {
    nb::list names;
    for (int i = 0; i < kNumForwardMatrices; ++i) names.append(forward_matrix_name(i));
    return names;
  });
  m.def("unpack_failure", &unpack_failure, "failure"_a);
  m.def("struct_sizes", [] {
    nb::dict d;
    d["CallSet"] = sizeof(CallSet);
    d["Launch"] = sizeof(Launch);
    d["Failure"] = sizeof(Failure);
    d["Maps"] = std::size_t{128} * kMaxLocalRanks * kNumForwardMatrices;  // of the kernels of a forward
    return d;
  });
  m.def(
      "reset_words",
      [](const Shape& shape, Word call, Word schedule) {
        std::vector<Word> words(static_cast<std::size_t>(region_bytes(Region::words, shape)) / sizeof(Word), 0);
        reset_words(words.data(), Epochs{call, schedule, 0, 0}, shape);
        return words;
      },
      "shape"_a, "call"_a, "schedule"_a, "Region words after a reset to these epochs.");
  m.def(
      "abort_word", [](const Shape& shape, int src_rank) { return abort_offset(src_rank, shape); }, "shape"_a,
      "src_rank"_a, "Index in region words of the word by which a rank ends everybody's calls.");
  m.def("inner_wait_names", [] {
    std::vector<std::string> names;
    for (int i = kNumEdges; i < static_cast<int>(InnerWait::kEnd); ++i)
      names.push_back(inner_wait_name(static_cast<InnerWait>(i)));
    return names;
  });
  m.def("trace_role_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kNumTraceRoles; ++i) names.push_back(trace_role_name(i));
    return names;
  });
  m.def("region_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kNumRegions; ++i) names.push_back(region_name(static_cast<Region>(i)));
    return names;
  });
  m.def(
      "symmetric_regions",
      [](const Shape& shape) {
        std::vector<std::string> names;
        for (int i = 0; i < kNumRegions; ++i)
          if (is_symmetric(static_cast<Region>(i), shape)) names.push_back(region_name(static_cast<Region>(i)));
        return names;
      },
      "shape"_a);
}

}  // namespace mok::host
