// What a worker did, one record an interval: the same on every target, so that one viewer shows them all.
#pragma once

#include "layout.h"

namespace mok {

// The intervals of a worker follow one another; none lies in another.
enum class TraceKind : int32 {
  wait,     // for a word (edge, index, peer), or, edge `tickets`, for the next task, or for another role (InnerWait)
  work,     // inside a tile
  publish,  // from the end of the tile until its signals are sent
  // Where the loads and stores of a tile have time of their own, in a GPU's matrix products:
  load,   // from the task's arrival until its last operands are under way
  store,  // of a tile, where no products follow to hide it
};

// What the roles of a GPU's matrix products wait for inside their CTA: more values of TraceRecord::edge.
enum class InnerWait : int32 {
  operands = kNumEdges,  // consumers: the first ones of a tile
  message_slot,          // scheduler: until everybody has read the task before
  stored_tile,           // publisher: until a tile's rows are stored
  kEnd,
};
constexpr const char* inner_wait_name(InnerWait wait) {
  constexpr const char* kNames[] = {"operands", "message_slot", "stored_tile"};
  return kNames[static_cast<int>(wait) - kNumEdges];
}

// On GPUs a CTA is several workers: number (CTA * kNumTraceRoles + role).
enum class TraceRole : int32 { cta, scheduler, producer, consumers, publisher, communicator, kEnd = communicator + 4 };
constexpr int kNumTraceRoles = static_cast<int>(TraceRole::kEnd);
constexpr const char* trace_role_name(int role) {
  constexpr const char* kNames[kNumTraceRoles] = {"CTA",           "scheduler",      "producer",       "consumers",
                                                  "publisher",     "communicator 0", "communicator 1", "communicator 2",
                                                  "communicator 3"};
  return kNames[role];
}

struct alignas(16) TraceRecord {
  int64 begin, end;  // nanoseconds, or logical steps where workers are fibers
  int64 index;       // of the edge
  int32 rank, worker, launch_idx;
  int32 kind;   // TraceKind
  int32 stage;  // Stage; the task's
  int32 block, part;
  int32 edge;       // Edge, or InnerWait; waits only
  int32 peer;       // -1: inside the rank
  int32 is_closed;  // 0: the wait was given up
};
static_assert(sizeof(TraceRecord) == 64);

}  // namespace mok
