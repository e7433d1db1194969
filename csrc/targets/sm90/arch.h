// Hopper: the tile of a GEMM CTA, its threads and its operands. The shared role loops (targets/cuda/gemm/) get all of it
// from here.
#pragma once

#include "targets/cuda/gemm/shared.h"

namespace mok::sm90 {

using namespace cuda::gemm;

template <class Stages>
class Consumer;  // consumer.h

// Two consumer warp groups own a tile of 128 rows x 256 accumulator columns together.
struct Arch : OneCta {
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int kRoleRegisters = 72, kConsumerRegisters = 216;
  static constexpr int kTileRows = 128, kAccumulatorCols = MOK_TILE_COLS;
  static constexpr int kBlockK = 64;  // one 128-byte row of a swizzled operand
  static constexpr int kOperandSlots = 4;

  static constexpr uint32 kABytes = kTileRows * 128, kBBytes = kAccumulatorCols * 128;  // 48 KB a slot
  static constexpr uint32 kBoxBytes = 64 * 128;                                         // of one TMA load: 64 rows
  struct Operands {
    unsigned char a[kOperandSlots][kABytes];
    unsigned char b[kOperandSlots][kBBytes];
  };

  // A warp's 16 rows x 64 columns on the way out. 16 bytes of padding keep stmatrix and the reads free of conflicts.
  static constexpr int kStagingPitch = 64 + 8;
  static constexpr uint32 kStagingBytes = 16 * kStagingPitch * sizeof(bf16);
  struct Scratch {
    alignas(16) unsigned char staging[kConsumerWarps][kStagingBytes];
    bf16* rows[kConsumerWarps][16];  // where the rows of a consumer warp go, in the plane at hand
  };

  // Arrivals that complete a phase.
  static constexpr int kOperandReaders = kConsumerWarps;               // `empty`
  static constexpr int kMessageReaders = 2 + kThreads - kRoleThreads;  // producer, publisher, consumers
  static constexpr int kStoringWarps = kConsumerWarps;                 // `stored`
  MOK_DEVICE static void init_barriers(Shared<Arch>&) {}               // all others

  template <class Stages>
  using Consumer = sm90::Consumer<Stages>;
  MOK_DEVICE static void set_consumer_registers(uint32 /*group*/) { raise_registers<kConsumerRegisters>(); }

  // The loads of one tile of the product S.
  template <class S>
  class Loader {
    static_assert(S::kMajorA == Major::k,
                  "A has rows of k here: a weight gradient's operands need wgmma's other form of A");

   public:
    template <int kNumMaps>
    MOK_DEVICE Loader(const TensorMap (&maps)[kNumMaps], const mok::Operands& operands, const GemmTile& tile)
        : a_map_(&maps[static_cast<int>(operands.a.matrix)]),
          b_map_{&maps[static_cast<int>(operands.b[0].matrix)], &maps[static_cast<int>(operands.b[1].matrix)]},
          a_row_(static_cast<int32>(operands.a.row)),
          first_col_(tile.first_col),
          expert_(tile.expert),
          has_second_half_(tile.num_rows > 64),
          num_bytes_((has_second_half_ ? kABytes : kABytes / 2) + kBBytes) {}

    // [k, k + kBlockK) of both operands into a slot; their bytes arrive at `full`.
    MOK_DEVICE void load(Shared<Arch>& shared, uint32 slot, uint32 full, int32 k) const {
      const uint32 a = smem_address(shared.operands.a[slot]), b = smem_address(shared.operands.b[slot]);
      mbarrier_expect_bytes(full, num_bytes_);
      tma_load_2d(a, a_map_, full, k, a_row_);
      if (has_second_half_) tma_load_2d(a + kABytes / 2, a_map_, full, k, a_row_ + 64);
      // B's boxes hold 64 accumulator columns each: gate before up, or the columns of one matrix.
      MOK_UNROLL
      for (int32 box = 0; box < kAccumulatorCols / 64; ++box) {
        const int32 col = first_col_ + box * 64 % S::kTileCols;
        const TensorMap* map = b_map_[box * 64 / S::kTileCols];
        if constexpr (S::kMajorB == Major::k)
          tma_load_3d(b + box * kBoxBytes, map, full, k, col, expert_);
        else
          tma_load_3d(b + box * kBoxBytes, map, full, col, k, expert_);
      }
    }

   private:
    const TensorMap* a_map_;
    const TensorMap* b_map_[2];
    const int32 a_row_, first_col_, expert_;
    const bool has_second_half_;  // of A; a half without real rows is neither loaded nor multiplied
    const uint32 num_bytes_;
  };
};

static_assert(sizeof(Shared<Arch>) <= MOK_GEMM_SMEM_BYTES, "mok_modular/targets/cuda/arch.py asks for this much");

}  // namespace mok::sm90

namespace mok::cuda::gemm {
using TargetArch = sm90::Arch;
}
