// The shared memory of a GEMM CTA and the messages between its roles. `Arch` is the GPU generation (targets/README.md).
#pragma once

#include "stages/product.h"
#include "targets/cuda/gemm/ptx.h"
#include "targets/cuda/gemm/timeline.h"

namespace mok::cuda::gemm {

constexpr int kRoleThreads = 128;  // of warp group 0: the roles of this folder; all other threads are consumers
constexpr int kTaskSlots = 1;      // tasks drawn ahead, beyond the one that the scheduler holds
constexpr int kTileSlots = 4;      // roles are never more than kTaskSlots + 1 tiles apart

// What the scheduler sends to the other roles.
struct alignas(16) Message {
  int32 state;  // MessageState
  int32 stage, block, part;
  int32 num_rows, first_col, num_cols, num_k, expert;
};

enum MessageState : int32 {
  kNoMoreTasks,  // in this call
  kReady,
  kNotReady,  // a wait of the tile's was false: it is computed, from whatever is there, but nothing of it may leave
};

// Where rows pass through that a communicating warp copies.
constexpr int kCommChunks = 7, kCommChunkBytes = 2048;
constexpr int kCommWarps = 4;  // at most; the rings of a communicating CTA lie where other CTAs have operands
struct alignas(128) CommRing {
  unsigned char chunks[kCommChunks][kCommChunkBytes];
  uint64 full[kCommChunks];
};

// Rows that the consumers copy for the communicator, before there are products (communicator.h).
struct Help {
  uint64 to[32], from[32];
  int32 num_rows;  // negative: no more
  int32 num_bytes;
};

template <class Arch>
struct alignas(1024) Shared {
  typename Arch::Operands operands;  // a ring of Arch::kOperandSlots blocks of k
  typename Arch::Scratch scratch;    // the consumers'
  Message messages[kTaskSlots];
  uint64 full[Arch::kOperandSlots], empty[Arch::kOperandSlots];
  uint64 message_full[kTaskSlots], message_empty[kTaskSlots];
  uint64 stored[kTileSlots];
  int32 is_comm_cta;
  CommRing comm_ring;
  MOK_TRACED(Timeline<kTileSlots> timeline;)

  MOK_DEVICE Help& help() { return reinterpret_cast<Help&>(scratch.staging); }  // before there is anything to store
  MOK_DEVICE CommRing& ring_of(uint32 warp) {
    return is_comm_cta ? reinterpret_cast<CommRing*>(&operands)[warp] : comm_ring;
  }

  static_assert(kCommWarps * sizeof(CommRing) <= sizeof(typename Arch::Operands));
  static_assert(sizeof(Help) <= sizeof(Arch::Scratch::staging));
};

// Tensor maps by Matrix (stages/matrices.h), one set per rank.
struct ForwardMaps {
  TensorMap maps[kMaxLocalRanks][kNumForwardMatrices];
  MOK_DEVICE void acquire(int32 /*index*/) const {}
};
// Those of a backward are more than a kernel's parameters hold, so they are in global memory, where the host wrote them.
struct BackwardMaps {
  const TensorMap (*maps)[kNumMatrices];
  // By the thread that loads, before it uses the maps of rank `index`.
  MOK_DEVICE void acquire(int32 index) const {
    for (int32 i = 0; i < kNumMatrices; ++i) fence_tensor_map(&maps[index][i]);
  }
};

// The next task, by one thread or by a warp. Every reader frees the slot for itself.
template <bool kIsWarp, class Arch>
MOK_DEVICE MessageState read_message(Shared<Arch>& shared, Position<kTaskSlots>& slot, Task* task, GemmTile* tile) {
  Arch::wait(smem_address(&shared.message_full[slot.slot]), slot.phase);
  const Message message = shared.messages[slot.slot];
  if (kIsWarp) __syncwarp();
  Arch::template free_message<kIsWarp>(smem_address(&shared.message_empty[slot.slot]));
  slot.advance();
  *task = Task{static_cast<Stage>(message.stage), message.block, message.part, message.expert, message.num_rows};
  *tile = GemmTile{message.expert, message.num_rows, message.first_col, message.num_cols, message.num_k};
  return static_cast<MessageState>(message.state);
}

// Where a tile belongs to one CTA: what a generation says of it, for its Arch to inherit.
struct OneCta {
  static constexpr int kCtasPerTile = 1;
  MOK_DEVICE static bool is_first_cta() { return true; }  // of the tile's: it draws tasks and publishes
  // At a barrier that threads of any of the tile's CTAs arrive at.
  MOK_DEVICE static void wait(uint32 barrier, uint32 phase) { mbarrier_wait(barrier, phase); }
  // By every thread that reads a message.
  template <bool kIsWarp>
  MOK_DEVICE static void free_message(uint32 barrier) {
    mbarrier_arrive(barrier);
  }
  // The first CTA has written messages[slot] of its own: for all of the tile's.
  template <class Arch>
  MOK_DEVICE static void send_message(Shared<Arch>& shared, uint32 slot) {
    mbarrier_arrive(smem_address(&shared.message_full[slot]));
  }
  // By all threads: behind the barriers' initialization, and before anybody leaves.
  template <class Arch>
  MOK_DEVICE static void begin(Shared<Arch>&) {
    __syncthreads();
  }
  template <class Arch>
  MOK_DEVICE static void end(Shared<Arch>&) {}
};

}  // namespace mok::cuda::gemm
