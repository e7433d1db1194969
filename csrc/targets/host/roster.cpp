// The roster for Python: the rows of protocol/roster.h, with every enumerator by its name.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "protocol/edge_table.h"

namespace nb = nanobind;

namespace mok::host {
void bind_roster(nb::module_& m);

namespace {

std::vector<std::string> names_of(StageMask mask) {
  std::vector<std::string> names;
  for (int i = 0; i < kNumStages; ++i)
    if (mask >> i & 1) names.push_back(kStages[i].name);
  return names;
}

struct StageWords {
  const char *place, *pass, *work, *inside;
};
struct EdgeWords {
  const char *scope, *epoch, *cells, *pass;
};
#define MOK_WORDS(name, Type, file, place, pass, work, tasks, lag, inside) {#place, #pass, #work, #inside},
constexpr StageWords kStageWords[] = {MOK_STAGES(MOK_WORDS)};
#undef MOK_WORDS
#define MOK_WORDS(name, scope, epoch, cells, pass, ...) {#scope, #epoch, #cells, #pass},
constexpr EdgeWords kEdgeWords[] = {MOK_EDGES(MOK_WORDS)};
#undef MOK_WORDS

nb::list stages() {
  nb::list rows;
  for (int i = 0; i < kNumStages; ++i) {
    nb::dict row;
    row["name"] = kStages[i].name;
    row["file"] = kStages[i].file;
    row["place"] = kStageWords[i].place;
    row["pass_name"] = kStageWords[i].pass;
    row["work"] = kStageWords[i].work;
    row["lag"] = kStages[i].lag;
    row["inside"] = kStages[i].inside == Stage::none ? "" : kStageWords[i].inside;
    rows.append(row);
  }
  return rows;
}

nb::list edges() {
  nb::list rows;
  for (int i = 0; i < kNumEdges; ++i) {
    const EdgeUsers& users = users_of(static_cast<Edge>(i));
    nb::dict row;
    row["name"] = kEdges[i].name;
    row["scope"] = kEdgeWords[i].scope;
    row["epoch"] = kEdgeWords[i].epoch;
    row["cells"] = kEdgeWords[i].cells;
    row["pass_name"] = kEdgeWords[i].pass;
    row["writers"] = names_of(users.writers);
    row["readers"] = names_of(users.readers);
    rows.append(row);
  }
  return rows;
}

}  // namespace

void bind_roster(nb::module_& m) {
  m.def(
      "roster",
      [] {
        nb::dict d;
        d["stages"] = stages();
        d["edges"] = edges();
        return d;
      },
      "The rows of protocol/roster.h: dicts of stages and of edges.");
}

}  // namespace mok::host
