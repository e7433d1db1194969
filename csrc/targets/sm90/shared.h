// What the role loops of a GEMM kernel share: sizes, the CTA's shared memory, messages between roles.
#pragma once

#include "stages/grouped_gemm.h"
#include "targets/sm90/ptx.h"
#include "targets/sm90/timeline.h"

namespace mok::sm90 {

constexpr int kThreads = 384;
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
constexpr int kBlockK = 64;  // one 128-byte row of a swizzled operand
constexpr int kTileRows = 128, kAccumulatorCols = MOK_TILE_COLS;
constexpr int kNumStages = 4;  // 48 KB each
constexpr int kTaskSlots = 1;  // tasks drawn ahead, beyond the one that the scheduler holds
constexpr int kTileSlots = 4;  // roles are never more than kTaskSlots + 1 tiles apart

constexpr uint32 kABytes = kTileRows * 128, kBBytes = kAccumulatorCols * 128;
constexpr uint32 kBoxBytes = 64 * 128;  // of one TMA load: 64 rows
// A warp's 16 rows x 64 columns on the way out. 16 bytes of padding keep stmatrix and the reads free of conflicts.
constexpr int kStagingPitch = 64 + 8;
constexpr uint32 kStagingBytes = 16 * kStagingPitch * sizeof(bf16);

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

struct alignas(1024) Shared {
  unsigned char a[kNumStages][kABytes];
  unsigned char b[kNumStages][kBBytes];
  alignas(16) unsigned char staging[8][kStagingBytes];
  bf16* rows[8][16];  // where the rows of a consumer warp go, in the plane at hand
  Message messages[kTaskSlots];
  uint64 full[kNumStages], empty[kNumStages];
  uint64 message_full[kTaskSlots], message_empty[kTaskSlots];
  uint64 stored[kTileSlots];
  int32 is_comm_cta;
  CommRing comm_ring;
  MOK_TRACED(Timeline<kTileSlots> timeline;)

  MOK_DEVICE Help& help() { return reinterpret_cast<Help&>(staging); }  // before there is anything to store
  MOK_DEVICE CommRing& ring_of(uint32 warp) { return is_comm_cta ? reinterpret_cast<CommRing*>(a)[warp] : comm_ring; }
};
static_assert(kCommWarps * sizeof(CommRing) <= sizeof(Shared::a) && sizeof(Help) <= sizeof(Shared::staging));

static_assert(sizeof(Shared) <= MOK_GEMM_SMEM_BYTES, "mok_modular/targets/cuda/device.py asks for this much");

// Tensor maps by Matrix (stages/grouped_gemm.h), one set a rank.
constexpr int kNumMatrices = static_cast<int>(Matrix::w_shared_down) + 1;
struct Maps {
  TensorMap maps[kMaxLocalRanks][kNumMatrices];
};

// The next task, by one thread or by a warp. Every reader frees the slot for itself.
template <bool kIsWarp>
MOK_DEVICE MessageState read_message(Shared& shared, Position<kTaskSlots>& slot, Task* task, GemmTile* tile) {
  mbarrier_wait(smem_address(&shared.message_full[slot.slot]), slot.phase);
  const Message message = shared.messages[slot.slot];
  if (kIsWarp) __syncwarp();
  mbarrier_arrive(smem_address(&shared.message_empty[slot.slot]));
  slot.advance();
  *task = Task{static_cast<Stage>(message.stage), message.block, message.part, message.expert, message.num_rows};
  *tile = GemmTile{message.expert, message.num_rows, message.first_col, message.num_cols, message.num_k};
  return static_cast<MessageState>(message.state);
}

}  // namespace mok::sm90
