// What tasks read and write, as cells with versions: the model's own, since it has no tiles. Addresses are those of
// stages/, by which a place in the ring, a context or a route's cell is told from others.
#pragma once

#include <string>
#include <vector>

#include "explore/ranks.h"
#include "protocol/tasks.h"

namespace mok::explore {

struct Access {
  mok_explore::Op op;  // read or write
  std::string cell;
  int version;
};

// Of a task of a call. `context_of`: the call whose context it uses.
std::vector<Access> accesses_of(const Ranks& ranks, const Call& call, const Task& task, int call_idx, int context_of);

// What call `call_idx` makes of a row block, or as a whole: no two versions are the same.
int version_of(int call_idx, int block = mok_explore::kWholeVersion);

}  // namespace mok::explore
