// What a task waits for and publishes, recorded from its stage, and what it reads and writes.
#pragma once

#include <string>
#include <vector>

#include "explore/ranks.h"
#include "explore/recorder.h"
#include "protocol/tasks.h"

namespace mok::explore {

std::vector<Record> recorded_needs(const Args& args, const Task& task);
std::vector<Record> recorded_publishes(const Args& args, const Task& task);

// Reads and writes are the model's own, since it has no tiles: cells with versions. Addresses are those of stages/, by which a
// place in the ring, a context or a route's cell is told from others. A stage that task_actions.cpp does not know has none.
struct Access {
  mok_explore::Op op;  // read or write
  std::string cell;
  int version;
};

// `context_of`: the call whose context it uses.
std::vector<Access> accesses_of(const Ranks& ranks, const Call& call, const Task& task, int call_idx, int context_of);

// What call `call_idx` makes of a row block, or as a whole: no two versions are the same.
int version_of(int call_idx, int block = mok_explore::kWholeVersion);

}  // namespace mok::explore
