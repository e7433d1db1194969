// The timelines of a GEMM CTA: a track a role (targets/cuda/timeline.h), and the times of its tiles.
//
// Consumers have no registers for records. One of their threads leaves times in shared memory, and the publisher writes
// records of them when it hears that the tile is stored.
#pragma once

#include "targets/cuda/timeline.h"

#if MOK_TRACE
namespace mok::cuda::gemm {

template <int kTileSlots>
class Timeline {
 public:
  MOK_DEVICE cuda::Track& open(const Launch& launch, TraceRole role, uint32 number = 0) {
    const int idx = static_cast<int>(role) + static_cast<int>(number);
    tracks_[idx].open(sink, idx, launch);
    return tracks_[idx];
  }
  MOK_DEVICE cuda::Track& track(TraceRole role, uint32 number = 0) {
    return tracks_[static_cast<int>(role) + static_cast<int>(number)];
  }

  // By the scheduler, and by a thread of the consumers; the barriers between roles order them as they do a tile's data.
  MOK_DEVICE void post(uint32 tile) { tiles_[tile].posted = now(); }
  MOK_DEVICE void begin(uint32 tile) { tiles_[tile].begin = now(); }
  MOK_DEVICE void end(uint32 tile) {
    tiles_[tile].end = now();
    tiles_[tile].is_flushed = 0;
  }
  MOK_DEVICE void flush(uint32 tile) { tiles_[tile].is_flushed = 1; }

  // By the publisher, behind the barrier that says that the tile is stored.
  MOK_DEVICE void add_tile(uint32 slot, const Task& task) {
    const int64 stored = cuda::Track::now();
    const Tile tile = tiles_[slot];
    const auto whole = [&](uint32 low) { return stored - (static_cast<uint32>(stored) - low); };
    cuda::Track& consumers = track(TraceRole::consumers);
    consumers.next_task(task, whole(tile.posted));
    consumers.wait(task, InnerWait::operands, whole(tile.begin));
    consumers.end(TraceKind::work, task, whole(tile.end));
    if (tile.is_flushed) consumers.end(TraceKind::store, task, stored);
  }

  cuda::TraceSink sink;

 private:
  // Low halves of the clock: they are looked at within a second.
  struct Tile {
    uint32 posted, begin, end;
    uint32 is_flushed;  // nothing was multiplied while its rows were stored
  };
  MOK_DEVICE static uint32 now() {
    uint32 low;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(low));
    return low;
  }

  cuda::Track tracks_[kNumTraceRoles];
  Tile tiles_[kTileSlots];
};

}  // namespace mok::cuda::gemm
#endif
