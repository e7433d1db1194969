// The role loops of a GEMM kernel on Hopper, for any GEMM stage of stages/grouped_gemm.h.
//
// One CTA an SM, 384 threads. Warp group 0 (40 registers): a scheduler thread draws tasks and waits for what
// they need, a producer thread loads operands by TMA, a publisher thread says that a tile is stored. Warp groups 1 and 2 (232 registers) multiply, tile about: each owns a 128 x 128 accumulator tile (two
// m64n128), and while one stores its tile the other multiplies. Roles meet at mbarriers only.
//
// Why ping-pong: measured on an H200 against one 128 x 256 tile shared by both groups, geometric mean over 24
// cases of the time of torch._grouped_mm over ours: 1.10 against 1.06. The shared tile exposes its epilogue at every
// K; ping-pong reads more shared memory and L2 and so runs at a lower clock (1445 against 1545 MHz at K = 7168), which
// eats part of it. Multicast over 2-CTA clusters: +0.3%, left out. ptxas wants no `trap` in a role (C7512).
// Tried: the shared 128 x 256 tile whose rounded words are stored 32 columns at a time in the shadow of the next tile's
// first k blocks. With a bare epilogue 1.11 (and 1.05 where each kernel runs alone, ping-pong 1.00: the better design);
// with this file's general epilogue a step has about 700 instructions, outlasts its k block, and down falls to 0.84.
#pragma once

#include "protocol/leave.h"
#include "stages/grouped_gemm.h"
#include "targets/cuda/worker.h"
#include "targets/sm90/wgmma.h"

namespace mok::sm90 {

constexpr int kThreads = 384;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBlockK = 64;  // one 128-byte row of a swizzled operand
constexpr int kTileRows = 128, kAccumulatorCols = 128;
constexpr int kNumStages = 6;  // 32 KB each
constexpr int kTaskSlots = 2;  // tasks drawn ahead
constexpr int kTileSlots = 4;  // roles are never more than kTaskSlots + 1 tiles apart

constexpr uint32 kABytes = kTileRows * 128, kBBytes = kAccumulatorCols * 128;
// A warp's 16 rows x 64 columns on the way out. 16 bytes of padding keep stmatrix and the reads free of conflicts.
constexpr int kStagingPitch = 64 + 8;
constexpr uint32 kStagingBytes = 16 * kStagingPitch * sizeof(bf16);

// What the scheduler sends to the other roles.
struct alignas(16) Message {
  int32 state;  // MessageState
  int32 block, part;
  int32 num_rows, first_col, num_cols, num_k, expert;
};

enum MessageState : int32 {
  kNoMoreTasks,  // in this call
  kReady,
  kNotReady,  // a wait of the tile's was false: it is computed, from whatever is there, but nothing of it may leave
};

struct alignas(1024) Shared {
  unsigned char a[kNumStages][kABytes];
  unsigned char b[kNumStages][kBBytes];
  alignas(16) unsigned char staging[8][kStagingBytes];
  Message messages[kTaskSlots];
  uint64 full[kNumStages], empty[kNumStages];
  uint64 message_full[kTaskSlots], message_empty[kTaskSlots];
  uint64 stored[kTileSlots];
};

static_assert(sizeof(Shared) <= MOK_GEMM_SMEM_BYTES, "mok_modular/targets/cuda.py asks for this much");

// Tensor maps by Matrix (stages/grouped_gemm.h), one set a rank.
constexpr int kNumMatrices = static_cast<int>(Matrix::w_shared_down) + 1;
struct Maps {
  TensorMap maps[kMaxLocalRanks][kNumMatrices];
};

// A position in a ring of mbarriers.
template <int kSlots>
struct Position {
  uint32 slot = 0, phase = 0;
  MOK_DEVICE void advance() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
  }
  MOK_DEVICE void advance(uint32 count) {
    const uint32 sum = slot + count;
    phase ^= sum / kSlots & 1;
    slot = sum % kSlots;
  }
};

// A single thread that waits and publishes; the Worker of Tasks and Signals here.
class RoleWorker {
 public:
  MOK_DEVICE explicit RoleWorker(int32 launch_idx) { waiter_.launch_idx = launch_idx; }
  MOK_DEVICE int32 num_workers() const { return gridDim.x; }
  MOK_DEVICE Word draw(Word* counter) { return atomicAdd(counter, Word{1}); }
  MOK_DEVICE void begin_task(const Task& task) { waiter_.task = task; }
  MOK_DEVICE void begin_wait(const Wait&) { waiter_.begin(); }
  MOK_DEVICE bool pause(const Args& args, const Wait& wait) { return waiter_.pause(args, wait); }
  MOK_DEVICE void end_wait(const Wait&) {}
  MOK_DEVICE void fail(const Args& args, const Wait& wait) { waiter_.fail(args, wait); }
  MOK_DEVICE bool may_publish(Edge, int64, int32) { return true; }
  SeenRanks seen_inputs, seen_dones;

 private:
  cuda::Waiter waiter_;
};

// A warp that stores its part of a tile: eight lanes take a row of 128 bytes.
class StoreWorker {
 public:
  template <class Dst, class Src>
  MOK_DEVICE void copy_rows(int32 count, int64 num_bytes, Dst&& dst, Src&& src) {
    const int32 lane = static_cast<int32>(lane_idx()), column = lane % 8;
    if (column * 16 >= static_cast<int32>(num_bytes)) return;  // none of them, where it is negative
    MOK_UNROLL
    for (int32 first = 0; first < 16; first += 4) {
      const int32 row = first + lane / 8;
      if (row >= count) continue;
      const bf16* from = src(row);
      bf16x8 word{};
      if (from) word = *reinterpret_cast<const bf16x8*>(from + column * 8);
      *reinterpret_cast<bf16x8*>(dst(row) + column * 8) = word;
    }
  }
};

// The four lanes of a quad hold 32 columns of a row: value i of a lane is column 8 * (i / 2) + 2 * (lane % 4) + i % 2.
struct QuadLanes {
  static constexpr int kNum = 8;
  MOK_DEVICE int32 column(int32 i) const { return 8 * (i / 2) + 2 * (static_cast<int32>(lane_idx()) % 4) + i % 2; }
  // Of all four; the whole warp calls.
  MOK_DEVICE uint32 max(uint32 value) const {
    value = max_of(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return max_of(value, __shfl_xor_sync(0xffffffffu, value, 2));
  }
};

template <class S>
class Roles {
 public:
  MOK_DEVICE Roles(Shared& shared, const CallSet& set, const Launch& launch, const Maps& maps)
      : shared_(shared), set_(set), launch_(launch), maps_(maps) {}

  MOK_DEVICE void run() {
    if (threadIdx.x == 0) init_barriers();
    __syncthreads();
    const uint32 group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const uint32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (group == 0) {
      lower_registers<kProducerRegisters>();
      if (lane_idx() == 0) {
        if (warp == 0) produce();
        if (warp == 1) schedule();
        if (warp == 2) publish();
      }
    } else {
      raise_registers<kConsumerRegisters>();
      consume(group - 1);
    }
  }

 private:
  MOK_DEVICE void init_barriers() {
    for (int i = 0; i < kNumStages; ++i) {
      mbarrier_init(address(&shared_.full[i]), 1);
      mbarrier_init(address(&shared_.empty[i]), 4);  // warps of the group that reads it
    }
    for (int i = 0; i < kTaskSlots; ++i) {
      mbarrier_init(address(&shared_.message_full[i]), 1);
      mbarrier_init(address(&shared_.message_empty[i]), 2 + 8);  // producer, publisher, consumer warps
    }
    for (int i = 0; i < kTileSlots; ++i) mbarrier_init(address(&shared_.stored[i]), 4);
    mbarrier_init_fence();
  }
  MOK_DEVICE static uint32 address(const void* pointer) { return smem_address(pointer); }

  // Calls `f(call index, args)` for the ranks of this GPU, each CTA starting at another one.
  template <class F>
  MOK_DEVICE void for_each_call(F&& f) const {
    for (int32 i = 0; i < set_.num_calls; ++i) {
      const int32 index = (static_cast<int32>(blockIdx.x) + i) % set_.num_calls;
      const Args args(set_.calls[index]);
      f(index, args);
    }
  }

  // ---- scheduler: draws, decodes and waits, up to kTaskSlots tiles ahead of the others ----
  // Measured: with the wait in the producer, its poll and fences emptied the operand ring at every tile (about 7,000 cycles).
  MOK_DEVICE void schedule() {
    Position<kTaskSlots> slot;
    RoleWorker worker(launch_.launch_idx);
    for_each_call([&](int32, const Args& args) {
      Signals<RoleWorker> signals(args, worker);
      Tasks tasks(args, launch_, Role::any);
      bool has_task = true;
      while (has_task) {
        Task task;
        has_task = tasks.next(worker, &task);
        worker.begin_task(task);
        const bool is_ready = has_task && S::needs(args, task, signals);
        mbarrier_wait(address(&shared_.message_empty[slot.slot]), slot.phase ^ 1);
        Message& message = shared_.messages[slot.slot];
        message.state = !has_task ? kNoMoreTasks : is_ready ? kReady : kNotReady;
        if (has_task) {
          const GemmTile tile = S::decode(args.call, task);
          message.block = task.block;
          message.part = task.part;
          message.num_rows = tile.num_rows;
          message.first_col = tile.first_col;
          message.num_cols = tile.num_cols;
          message.num_k = tile.num_k;
          message.expert = tile.expert;
        }
        mbarrier_arrive(address(&shared_.message_full[slot.slot]));
        slot.advance();
      }
    });
  }

  // By one thread, or by a warp whose first lane frees the slot.
  template <bool kIsWarp>
  MOK_DEVICE MessageState read(Position<kTaskSlots>& slot, Task* task, GemmTile* tile) {
    mbarrier_wait(address(&shared_.message_full[slot.slot]), slot.phase);
    const Message message = shared_.messages[slot.slot];
    if (kIsWarp) __syncwarp();
    if (!kIsWarp || lane_idx() == 0) mbarrier_arrive(address(&shared_.message_empty[slot.slot]));
    slot.advance();
    *task = Task{S::kStage, message.block, message.part, message.expert, message.num_rows};
    *tile = GemmTile{message.expert, message.num_rows, message.first_col, message.num_cols, message.num_k};
    return static_cast<MessageState>(message.state);
  }

  // ---- producer: keeps the operand ring full, across tiles ----
  MOK_DEVICE void produce() {
    Position<kTaskSlots> slot;
    Position<kNumStages> stage;
    for_each_call([&](int32 index, const Args& args) {
      Task task;
      GemmTile tile;
      while (read<false>(slot, &task, &tile) != kNoMoreTasks) {
        fence_proxy_async();  // generic writes of others, acquired by the scheduler, before our TMA reads
        load(index, args.call, task, tile, stage);
      }
    });
  }
  MOK_DEVICE void load(int32 index, const Call& call, const Task& task, const GemmTile& tile,
                       Position<kNumStages>& stage) {
    const Operands operands = S::operands(call, task, tile);
    const TensorMap* a_map = &maps_.maps[index][static_cast<int>(operands.a)];
    const TensorMap* b_map[2] = {&maps_.maps[index][static_cast<int>(operands.b[0])],
                                 &maps_.maps[index][static_cast<int>(operands.b[1])]};
    const int32 a_row = static_cast<int32>(operands.a_row);
    const bool has_second_half = tile.num_rows > 64;  // of A; a half without real rows is neither loaded nor multiplied
    const uint32 num_bytes = (has_second_half ? kABytes : kABytes / 2) + kBBytes;
    for (int32 k = 0; k < tile.num_k; k += kBlockK) {
      mbarrier_wait(address(&shared_.empty[stage.slot]), stage.phase ^ 1);
      const uint32 full = address(&shared_.full[stage.slot]);
      const uint32 a = address(shared_.a[stage.slot]), b = address(shared_.b[stage.slot]);
      mbarrier_expect_bytes(full, num_bytes);
      tma_load_2d(a, a_map, full, k, a_row);
      if (has_second_half) tma_load_2d(a + kABytes / 2, a_map, full, k, a_row + 64);
      // Gate above up in shared memory, or the upper half of the columns of one matrix.
      tma_load_3d(b, b_map[0], full, k, tile.first_col, tile.expert);
      tma_load_3d(b + kBBytes / 2, b_map[1], full, k, tile.first_col + (S::kNumAccumulators == 2 ? 0 : 64),
                  tile.expert);
      stage.advance();
    }
  }

  // ---- consumers ----
  MOK_DEVICE void consume(uint32 group) {
    Position<kTaskSlots> slot;
    Position<kNumStages> stage;
    uint32 num_tiles = 0;
    const uint32 warp = threadIdx.x / 32 % 4;
    bf16* staging = reinterpret_cast<bf16*>(shared_.staging[group * 4 + warp]);
    float acc[2][64];
    if (group == 1) named_arrive(kTurn, 256);  // warp group 0 goes first
    for_each_call([&](int32, const Args& args) {
      Task task;
      GemmTile tile;
      for (;;) {
        const MessageState state = read<true>(slot, &task, &tile);
        if (state == kNoMoreTasks) break;
        const uint32 tile_slot = num_tiles % kTileSlots, owner = num_tiles & 1;
        ++num_tiles;
        const uint32 num_blocks = static_cast<uint32>(tile.num_k) / kBlockK;
        if (owner != group) {
          stage.advance(num_blocks);
          continue;
        }
        named_sync(kTurn + group, 256);
        if (tile.num_rows > 64)
          multiply<2>(acc, stage, num_blocks);
        else
          multiply<1>(acc, stage, num_blocks);
        named_arrive(kTurn + (group ^ 1), 256);
        finish(acc, stage);
        if (state == kReady) store(args.call, task, acc, staging, warp);
        __syncwarp();
        if (lane_idx() == 0) mbarrier_arrive(address(&shared_.stored[tile_slot]));
      }
    });
  }

  MOK_DEVICE void release(uint32 slot) {
    if (lane_idx() == 0) mbarrier_arrive(address(&shared_.empty[slot]));
  }

  // k blocks in ascending order into one accumulator: the order of additions depends on nothing else.
  template <int kHalves>
  MOK_DEVICE void multiply(float (&acc)[2][64], Position<kNumStages>& stage, uint32 num_blocks) {
    const uint64 a0 = wgmma_descriptor(address(shared_.a[0])), b0 = wgmma_descriptor(address(shared_.b[0]));
    uint32 previous = 0;
    for (uint32 block = 0; block < num_blocks; ++block) {
      mbarrier_wait(address(&shared_.full[stage.slot]), stage.phase);
      const uint64 a = a0 + stage.slot * (kABytes >> 4), b = b0 + stage.slot * (kBBytes >> 4);
      wgmma_fence();
      MOK_UNROLL
      for (uint32 step = 0; step < 4; ++step) {
        const uint32 accumulate = block | step;
        wgmma_n128(acc[0], a + 2 * step, b + 2 * step, accumulate);
        if (kHalves == 2) wgmma_n128(acc[1], a + 2 * step + (kABytes / 2 >> 4), b + 2 * step, accumulate);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the block before is done: its stage is free
      if (block > 0) release(previous);
      previous = stage.slot;
      stage.advance();
    }
  }
  MOK_DEVICE void finish(float (&acc)[2][64], const Position<kNumStages>& stage) {
    wgmma_wait<0>();
    wgmma_fence_accumulators(acc[0]);
    wgmma_fence_accumulators(acc[1]);
    release((stage.slot + kNumStages - 1) % kNumStages);
  }

  // Plane by plane, 16 rows x 64 columns of a warp at a time.
  MOK_DEVICE void store(const Call& call, const Task& task, const float (&acc)[2][64], bf16* staging, uint32 warp) {
    PlaneList planes = S::planes(call, task);
#pragma unroll 1
    while (!planes.is_empty()) {
      const Plane plane = planes.pop();
      bf16* rows = S::plane_rows(call, task, plane);
      MOK_UNROLL
      for (int32 half = 0; half < 2; ++half) {
        MOK_UNROLL
        for (int32 first_col = 0; first_col < S::kTileCols; first_col += 64)
          store_part(call, task, plane, rows, acc[half], first_col, half * 64 + static_cast<int32>(warp) * 16, staging);
      }
    }
  }
  MOK_DEVICE void store_part(const Call& call, const Task& task, Plane plane, bf16* rows, const float (&acc)[64],
                             int32 first_col, int32 first_row, bf16* staging) {
    const uint32 lane = lane_idx();
    const uint32 write = address(staging) + (lane % 8) * kStagingPitch * sizeof(bf16) + lane / 8 * 16;
    MOK_UNROLL
    for (int32 col32 = 0; col32 < 64; col32 += 32) {
      MOK_UNROLL
      for (int32 h = 0; h < 2; ++h) {  // a lane holds rows lane / 4 and lane / 4 + 8
        float acc0[QuadLanes::kNum], acc1[QuadLanes::kNum];
        MOK_UNROLL
        for (int32 i = 0; i < QuadLanes::kNum; ++i) {
          const int32 at = (first_col + col32) / 2 + i / 2 * 4 + h * 2 + i % 2;
          acc0[i] = acc[at];
          acc1[i] = S::kNumAccumulators == 2 ? acc[at + 32] : 0.0f;  // up stands 64 columns behind gate
        }
        bf16 values[QuadLanes::kNum];
        S::element(call, plane, acc0, acc1, QuadLanes{}, values);
        const uint32 words[4] = {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
                                 pack(values[6], values[7])};
        stmatrix_x4(write + h * 8 * kStagingPitch * sizeof(bf16) + col32 * sizeof(bf16), words);
      }
    }
    __syncwarp();
    StoreWorker worker;
    S::store(call, worker, task, rows, TilePart{first_row, 16, first_col, 64, staging, kStagingPitch});
    __syncwarp();
  }

  // ---- publisher: off everybody's critical path ----
  // Each warp arrives after its stores (release in the CTA); this thread's release is cumulative.
  MOK_DEVICE void publish() {
    Position<kTaskSlots> slot;
    Position<kTileSlots> tile_slot;
    RoleWorker worker(launch_.launch_idx);
    for_each_call([&](int32, const Args& args) {
      Signals<RoleWorker> signals(args, worker);
      Task task;
      GemmTile tile;
      for (;;) {
        const MessageState state = read<false>(slot, &task, &tile);
        if (state == kNoMoreTasks) break;
        mbarrier_wait(address(&shared_.stored[tile_slot.slot]), tile_slot.phase);
        if (state == kReady) S::publishes(args, task, signals);
        tile_slot.advance();
      }
      leave_last_group(args, launch_, worker);
    });
  }

  static constexpr uint32 kTurn = 1;  // named barriers kTurn and kTurn + 1: whose turn it is to multiply

  Shared& shared_;
  const CallSet& set_;
  const Launch& launch_;
  const Maps& maps_;
};

// A GEMM kernel: dynamic shared memory of sizeof(Shared) + 1024, whatever the alignment of its start.
template <class S>
MOK_DEVICE void run_gemm_kernel(const CallSet& set, const Launch& launch, const Maps& maps) {
  extern __shared__ unsigned char raw[];
  const uint32 misalignment = smem_address(raw) % 1024;
  Shared& shared = *reinterpret_cast<Shared*>(raw + (misalignment ? 1024 - misalignment : 0));
  Roles<S>(shared, set, launch, maps).run();
}

}  // namespace mok::sm90

#define MOK_GEMM_KERNEL(name, S, kGroup)                                                     \
  extern "C" __global__ void __launch_bounds__(mok::sm90::kThreads, 1)                       \
      mok_##name(const __grid_constant__ CallSet set, const __grid_constant__ Launch launch, \
                 const __grid_constant__ mok::sm90::Maps maps) {                             \
    mok::sm90::run_gemm_kernel<S>(set, launch, maps);                                        \
  }
