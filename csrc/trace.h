// What a worker did, one record an interval: the same on every target, so that one viewer shows them all.
#pragma once

#include "layout.h"

namespace mok {

// The intervals of a worker follow one another; none lies in another.
enum class TraceKind : int32 {
  wait,     // for a word (edge, index, peer), or, edge `tickets`, for the next task
  work,     // inside a tile
  publish,  // from the end of the tile until its signals are sent
};

struct TraceRecord {
  int64 begin, end;  // nanoseconds, or logical steps where workers are fibers
  int64 index;       // of the edge
  int32 rank, worker, launch_idx;
  int32 kind;   // TraceKind
  int32 stage;  // Stage; the task's
  int32 block, part;
  int32 edge;       // Edge; waits only
  int32 peer;       // -1: inside the rank
  int32 is_closed;  // 0: the wait was given up
};
static_assert(sizeof(TraceRecord) == 64);

}  // namespace mok
