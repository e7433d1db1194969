// The consumers of a GEMM kernel: two warp groups, 64 rows x 256 accumulator columns of every tile each.
//
// Tile after tile, in a warp group (cycles measured on an H200 with a bare epilogue, K = 1024):
//   products      1024 a k block, both groups together. The groups issue a block's products in turn, so that they end 512
//                 cycles apart and the bubble of one lies under the products of the other
//   next task     240, read while the last products run
//   rounding      250: the accumulators become 64 words of BF16 and are free for the next tile
//   stores        2500 if done here; instead 32 columns of a plane go in the shadow of each of the next tile's first k blocks
// A step of that has to fit beside its k block, so what can be settled once a tile is: which planes there are (their places
// in the sequence are fixed, so that a step's code knows its plane), zeros in padding rows, where the rows go.
// Nothing is stored late for ever: before a wait that could depend on these rows they are flushed.
//
// Why not two tiles of 128 x 128 in turn (ping-pong): that hides its epilogue as well, but reads 64 KB from the L2 and 96 KB
// of shared memory for what this does with 48 and 80, and the chip, at its power limit, clocks lower. Tried and
// left out: 2-CTA clusters with multicast, L2 hints, a lag between the groups (docs/experiments/sm90-deferred-stores.md).
#pragma once

#include "targets/cuda/gemm/stage_set.h"
#include "targets/sm90/arch.h"
#include "targets/sm90/wgmma.h"

namespace mok::sm90 {

// The 256 threads of both groups, for element stages.
struct ElementWorker {
  template <class Index, class F>
  MOK_DEVICE void for_each(Index count, F&& f) const {
    for (Index i = static_cast<Index>(threadIdx.x) - 128; i < count; i += 256) f(i);
  }
};

// The four lanes of a quad hold 32 columns of a row: value i of a lane is column 8 * (i / 2) + 2 * (lane % 4) + i % 2.
struct QuadLanes {
  static constexpr int kNum = 8;
  bool has_row = true;
  MOK_DEVICE int32 column(int32 i) const { return 8 * (i / 2) + 2 * (static_cast<int32>(lane_idx()) % 4) + i % 2; }
  MOK_DEVICE bool is_first() const { return has_row && lane_idx() % 4 == 0; }
  // Over all four; the whole warp calls.
  MOK_DEVICE uint32 max(uint32 value) const {
    value = max_of(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return max_of(value, __shfl_xor_sync(0xffffffffu, value, 2));
  }
  MOK_DEVICE float sum(const float (&values)[kNum]) const {  // in the tree of sum_of_columns
    const float quad =
        ((values[0] + values[1]) + (values[2] + values[3])) + ((values[4] + values[5]) + (values[6] + values[7]));
    const float half = quad + __shfl_xor_sync(0xffffffffu, quad, 1);
    return half + __shfl_xor_sync(0xffffffffu, half, 2);
  }
};

template <class Stages>
class Consumer {
  static_assert(!Stages::kHasSums, "no FP32 stores and no carry to start from on this generation");
  static constexpr Major kMajorB = Stages::kMajorB;

 public:
  MOK_DEVICE Consumer(Shared<Arch>& shared, uint32 group)
      : shared_(shared), group_(group), warp_(threadIdx.x / 32 % 4), is_first_lane_(lane_idx() == 0) {
    if (group == 1) give_turn();  // group 0 begins
  }

  // All tiles of one call.
  MOK_DEVICE void run(const Args& args) {
    const Call& call = args.call;
    Task task;
    GemmTile tile;
    MessageState state = kNoMoreTasks;
    bool has_task = false;
    for (;;) {
      // Whoever sends the next task may be waiting for rows that are not stored. (A task that is there has all it needs.)
      if (!has_task && (!is_pending_ || is_message_there())) {
        state = read_message<true>(shared_, slot_, &task, &tile);
        has_task = true;
      }
      const bool is_end = has_task && state == kNoMoreTasks;
      if (is_end && !is_pending_) return;
      const int32 num_blocks = tile.num_k / Arch::kBlockK;
      const bool is_padding = task.num_rows <= static_cast<int32>(group_) * 64;
      // Stores without products in front of them: one place for both, since their code is long.
      const bool is_element = has_task && Stages::is_swiglu(task.stage);
      const bool is_flush = is_pending_ && (!has_task || is_end || is_element || is_padding || num_blocks < kSteps);
      if (is_element && !is_flush) {
        run_element(args, task, state);
        has_task = false;
        continue;
      }
      MOK_TRACED(trace_begin(is_flush);)
      if (is_flush || !is_padding) multiply(call, is_flush ? 0 : num_blocks);
      if (is_flush) {
        wgmma_wait<0>();  // none is pending; ptxas would put one here (C7517)
        wgmma_fence_accumulators(acc_);
        continue;
      }
      if (is_padding) skip(num_blocks);
      // The tile before is stored; this one is the next to be.
      stored_task_ = task;
      stored_num_cols_ = tile.num_cols;
      choose_planes(call, state);
      place_rows(call, first_plane());
      has_task = !is_padding && is_message_there();
      if (has_task) state = read_message<true>(shared_, slot_, &task, &tile);
      finish(is_padding);
      MOK_TRACED(if (threadIdx.x == kTracedThread) shared_.timeline.end(tile_slot_);)
      if (stored_task_.num_rows < Arch::kTileRows) clear_padding();
      is_pending_ = true;
    }
  }

 private:
  // Of all planes of a tile. Two products of a kernel may differ in their planes, so steps belong to one epilogue.
  template <class S>
  static constexpr int32 kStepsOf = S::kTileCols / 32 * S::kMaxPlanes;
  template <class... S>
  static constexpr int32 most_steps(TypeList<S...>) {
    int32 most = 0;
    ((most = kStepsOf<S> > most ? kStepsOf<S> : most), ...);
    return most;
  }
  static constexpr int32 kSteps = most_steps(typename Stages::Epilogues());
  static constexpr uint32 kTurn =
      1;  // named barriers 1 and 2: whose turn it is to issue products (3: cuda/gemm/communicator.h)

  MOK_DEVICE void take_turn() const { named_sync(kTurn + group_, 256); }
  MOK_DEVICE void give_turn() const { named_arrive(kTurn + (group_ ^ 1), 256); }
  MOK_DEVICE void release(uint32 slot) const {
    if (is_first_lane_) mbarrier_arrive(smem_address(&shared_.empty[slot]));
  }
  // One answer for a warp. Warps of a group may get different ones: what hangs on it contains no product.
  MOK_DEVICE bool is_message_there() const {
    return __all_sync(0xffffffffu, mbarrier_test(smem_address(&shared_.message_full[slot_.slot]), slot_.phase));
  }

#if MOK_TRACE
  static constexpr uint32 kTracedThread = 128;  // group 0's first: its half of a tile is never padding alone
  // Before products, or stores without them.
  MOK_DEVICE void trace_begin(bool is_flush) {
    if (!is_flush) mbarrier_wait(smem_address(&shared_.full[stage_.slot]), stage_.phase);  // the products' first wait
    if (threadIdx.x != kTracedThread) return;
    if (is_flush)
      shared_.timeline.flush(tile_slot_);
    else
      shared_.timeline.begin((tile_slot_ + is_pending_) % kTileSlots);
  }
#endif

  // ---- products ----

  // k blocks in ascending order into one accumulator: the order of additions depends on nothing else. None: stores only.
  MOK_DEVICE void multiply(const Call& call, int32 num_blocks) {
    uint32 previous = 0;
    int32 block = 0;
    // Steps are spread over the first half of the tile, with `pause` blocks between two: all CTAs store at about the same time.
    const int32 pause = max_of(0, num_blocks / (2 * kSteps) - 1);
    MOK_UNROLL
    for (int32 step = 0; step < kSteps; ++step) {
      const bool is_there = block < num_blocks;
      if (is_there) issue(block);
      if (is_pending_) store_step(call, step);
      if (is_there) retire(block, previous);
      ++block;
#pragma unroll 1
      for (const int32 end = is_pending_ ? min_of(num_blocks, block + pause) : 0; block < end; ++block) {
        issue(block);
        retire(block, previous);
      }
    }
    for (; block < num_blocks; ++block) {
      issue(block);
      retire(block, previous);
    }
  }
  MOK_DEVICE void issue(int32 block) {
    mbarrier_wait(smem_address(&shared_.full[stage_.slot]), stage_.phase);
    const uint64 a = wgmma_descriptor(smem_address(shared_.operands.a[0]) + group_ * (Arch::kABytes / 2)) +
                     stage_.slot * (Arch::kABytes >> 4);
    const uint32 b_tile = smem_address(shared_.operands.b[0]);
    const uint64 b = (kMajorB == Major::k ? wgmma_descriptor(b_tile) : wgmma_descriptor_mn(b_tile)) +
                     stage_.slot * (Arch::kBBytes >> 4);
    take_turn();
    wgmma_fence();
    MOK_UNROLL
    for (int32 i = 0; i < 4; ++i)
      wgmma_n256<kMajorB>(acc_, a + kWgmmaStep<Major::k> * i, b + kWgmmaStep<kMajorB> * i,
                          i == 0 ? static_cast<uint32>(block != 0) : 1u);
    wgmma_commit();
    give_turn();
  }
  MOK_DEVICE void retire(int32 block, uint32& previous) {
    wgmma_wait<1>();  // the block before is done: its stage is free
    if (block > 0) release(previous);
    previous = stage_.slot;
    stage_.advance();
  }
  // The last products, and the rounded tile.
  MOK_DEVICE void finish(bool is_padding) {
    wgmma_wait<0>();
    wgmma_fence_accumulators(acc_);
    if (!is_padding) release((stage_.slot + Arch::kOperandSlots - 1) % Arch::kOperandSlots);
    MOK_UNROLL
    for (int32 i = 0; i < 64; ++i) words_[i] = pack(to_bf16(acc_[2 * i]), to_bf16(acc_[2 * i + 1]));
  }
  // This group's half of the tile is all padding: keep the operands and the turns going, multiply nothing.
  MOK_DEVICE void skip(int32 num_blocks) {
    for (int32 block = 0; block < num_blocks; ++block) {
      mbarrier_wait(smem_address(&shared_.full[stage_.slot]), stage_.phase);
      __syncwarp();
      release(stage_.slot);
      stage_.advance();
      take_turn();
      give_turn();
    }
  }

  // ---- stores ----

  MOK_DEVICE int32 first_row() const { return static_cast<int32>(group_ * 64 + warp_ * 16); }
  MOK_DEVICE int32 first_plane() const { return __ffs(static_cast<int>(planes_)) - 1; }

  // Bit i: plane_at(i) is stored.
  MOK_DEVICE void choose_planes(const Call& call, MessageState state) {
    planes_ = 0;
    Stages::visit(stored_task_.stage, [&](auto s) {
      using S = decltype(s);
      const PlaneList list = state == kReady ? S::planes(call, stored_task_) : PlaneList{};
      epilogue_ = Stages::Epilogues::template place<typename S::Epilogue>();
      MOK_UNROLL
      for (int32 i = 0; i < S::kMaxPlanes; ++i) planes_ |= static_cast<uint32>(list.has(S::plane_at(i))) << i;
    });
  }
  // Lane i of the first half places row i.
  MOK_DEVICE void place_rows(const Call& call, int32 idx) {
    const int32 lane = static_cast<int32>(lane_idx());
    if (idx >= 0 && lane < 16) {
      Stages::visit(stored_task_.stage, [&](auto s) {
        using S = decltype(s);
        bf16* rows = S::plane_rows(call, stored_task_, S::plane_at(idx));
        bf16* row = S::row_address(call, stored_task_, rows, first_row() + lane);
        shared_.scratch.rows[group_ * 4 + warp_][lane] = row ? row + stored_task_.part * S::kTileCols : nullptr;
      });
    }
    __syncwarp();
  }
  // Padding rows are zeros, whatever their operands held. A lane holds rows lane / 4 and lane / 4 + 8 of the warp.
  MOK_DEVICE void clear_padding() {
    const int32 row = first_row() + static_cast<int32>(lane_idx()) / 4;
    MOK_UNROLL
    for (int32 h = 0; h < 2; ++h) {
      if (row + h * 8 < stored_task_.num_rows) continue;
      MOK_UNROLL
      for (int32 i = h; i < 64; i += 2) words_[i] = 0;
    }
  }
  // 32 columns of one plane into shared memory; every second step sends 64 columns of this warp's 16 rows on their way.
  MOK_DEVICE void store_step(const Call& call, int32 step) {
    Stages::Epilogues::visit(epilogue_, [&](auto s) {
      if (step < kStepsOf<decltype(s)>) store_step_of<decltype(s)>(call, step);
    });
  }
  template <class S>
  MOK_DEVICE void store_step_of(const Call& call, int32 step) {
    constexpr int32 kStepsOfPlane = S::kTileCols / 32;
    const int32 idx = step / kStepsOfPlane, col32 = step % kStepsOfPlane * 32;
    if (planes_ >> idx & 1) {
      if (col32 == 0 && idx > 0 && idx != first_plane()) place_rows(call, idx);
      round_columns<S>(call, S::plane_at(idx), col32);
      if (col32 % 64 == 32 && col32 - 32 < stored_num_cols_) send_columns(col32 - 32);
    }
    if (col32 + 32 == S::kTileCols && planes_ >> (idx + 1) == 0) say_stored();
  }
  template <class S>
  MOK_DEVICE void round_columns(const Call& call, Plane plane, int32 col32) {
    constexpr int32 kUpWords = S::kNumAccumulators == 2 ? 32 : 0;  // up stands behind gate
    const uint32 lane = lane_idx();
    const uint32 write = smem_address(staging()) + lane % 8 * (Arch::kStagingPitch * sizeof(bf16)) + lane / 8 * 16;
    const int32 accumulator = S::plane_accumulator(plane);
    MOK_UNROLL
    for (int32 h = 0; h < 2; ++h) {  // a lane holds rows lane / 4 and lane / 4 + 8
      uint32 out[4];
      const int32 first = col32 / 4 + h;  // every second word: those of the other row stand between
      if (accumulator >= 0) {
        MOK_UNROLL
        for (int32 i = 0; i < 4; ++i) out[i] = words_[first + 2 * i + accumulator * kUpWords];
      } else {
        float acc0[QuadLanes::kNum], acc1[QuadLanes::kNum];
        bf16 values[QuadLanes::kNum];
        MOK_UNROLL
        for (int32 i = 0; i < QuadLanes::kNum; ++i) {
          acc0[i] = half_of(words_[first + i / 2 * 2], i % 2);
          acc1[i] = half_of(words_[first + i / 2 * 2 + kUpWords], i % 2);
        }
        if constexpr (S::kElementReadsRows) {
          // It is called for columns and rows that exist; padding rows become zeros.
          const int32 row = first_row() + static_cast<int32>(lane) / 4 + h * 8;
          const bool has_row = row < stored_task_.num_rows;
          if (col32 < stored_num_cols_)
            S::element(call, stored_task_, plane, min_of(row, stored_task_.num_rows - 1), col32, acc0, acc1,
                       QuadLanes{has_row}, values);
          MOK_UNROLL
          for (int32 i = 0; i < QuadLanes::kNum; ++i)
            if (!has_row) values[i] = bf16{0};
        } else {
          S::element(call, stored_task_, plane, first_row(), col32, acc0, acc1, QuadLanes{}, values);
        }
        MOK_UNROLL
        for (int32 i = 0; i < 4; ++i) out[i] = pack(values[2 * i], values[2 * i + 1]);
      }
      stmatrix_x4(write + h * 8 * Arch::kStagingPitch * sizeof(bf16) + col32 % 64 * sizeof(bf16), out);
    }
  }
  // 64 columns: eight lanes take a row of 128 bytes.
  MOK_DEVICE void send_columns(int32 first_col) {
    __syncwarp();
    const int32 lane = static_cast<int32>(lane_idx()), column = lane % 8 * 8;
    bf16* const* rows = shared_.scratch.rows[group_ * 4 + warp_] + lane / 8;
    const bf16* from = staging() + lane / 8 * Arch::kStagingPitch + column;
    MOK_UNROLL
    for (int32 i = 0; i < 4; ++i) {
      bf16* to = rows[4 * i];
      const bf16x8 word = *reinterpret_cast<const bf16x8*>(from + 4 * i * Arch::kStagingPitch);
      if (to) *reinterpret_cast<bf16x8*>(to + first_col + column) = word;
    }
    __syncwarp();
  }
  MOK_DEVICE void run_element(const Args& args, const Task& task, MessageState state) {
    ElementWorker worker;
    MOK_TRACED(if (threadIdx.x == kTracedThread) shared_.timeline.begin(tile_slot_);)
    if (state == kReady) Swiglu::tile(args, worker, task);
    MOK_TRACED(if (threadIdx.x == kTracedThread) shared_.timeline.end(tile_slot_);)
    say_stored();
  }
  // Each warp arrives after its stores (release in the CTA); the publisher's release is cumulative.
  MOK_DEVICE void say_stored() {
    __syncwarp();
    if (is_first_lane_) mbarrier_arrive(smem_address(&shared_.stored[tile_slot_]));
    tile_slot_ = (tile_slot_ + 1) % kTileSlots;
    is_pending_ = false;
  }
  MOK_DEVICE bf16* staging() const { return reinterpret_cast<bf16*>(shared_.scratch.staging[group_ * 4 + warp_]); }
  MOK_DEVICE static float half_of(uint32 pair, int32 i) { return bits_to_float(i ? pair & 0xffff0000u : pair << 16); }

  Shared<Arch>& shared_;
  const uint32 group_, warp_;
  const bool is_first_lane_;
  Position<kTaskSlots> slot_;
  Position<Arch::kOperandSlots> stage_;
  uint32 tile_slot_ = 0;
  float acc_[128];
  // The tile before: rounded words (word 2 * (column / 8) + h, gate in the first half, up in the second), not stored yet.
  uint32 words_[64];
  Task stored_task_;
  int32 stored_num_cols_ = 0;
  uint32 planes_ = 0;
  int32 epilogue_ = 0;
  bool is_pending_ = false;
};

}  // namespace mok::sm90
