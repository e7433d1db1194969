// Who publishes an edge and who waits for it, from the roster, for documentation and checks: a test holds real runs of the
// stage code, all plans and both passes, against it in both directions. No kernel reads it.
#pragma once

#include "protocol/roster.h"

namespace mok {

struct EdgeUsers {
  StageMask writers, readers;  // of a worker's task at hand
};

namespace edge_table {
// In the words of the roster's lists.
using enum Stage;
struct Every {};
constexpr Every every;

constexpr StageMask mask() { return 0; }
constexpr StageMask mask(Every) { return kEveryStage; }
template <class... Rest>
constexpr StageMask mask(Stage first, Rest... rest) {
  return stage_bit(first) | mask(rest...);
}

#define MOK_EDGE_USERS(name, scope, epoch, cells, pass, arrivals, writers, readers) {mask writers, mask readers},
constexpr EdgeUsers kUsers[kNumEdges] = {MOK_EDGES(MOK_EDGE_USERS)};
#undef MOK_EDGE_USERS
}  // namespace edge_table

constexpr const EdgeUsers& users_of(Edge edge) { return edge_table::kUsers[static_cast<int>(edge)]; }
constexpr bool writes(Stage stage, Edge edge) { return (users_of(edge).writers & stage_bit(stage)) != 0; }
constexpr bool waits_for(Stage stage, Edge edge) { return (users_of(edge).readers & stage_bit(stage)) != 0; }

}  // namespace mok
