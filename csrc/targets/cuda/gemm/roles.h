// The role loops of a GEMM kernel, for one product (stages/product.h) or for several, on every GPU generation.
//
// One CTA per SM. Warp group 0: a scheduler thread draws tasks and waits for what they need, a producer thread loads
// operands by TMA, a publisher thread says that a tile is stored, and where the kernel holds communication too, the fourth
// warp does that (communicator.h). The other warps are the generation's consumers: they multiply and store. Roles meet at
// mbarriers only, but for the start, where consumers may copy for the communicator. ptxas wants no `trap` in a role (C7512).
#pragma once

#include "protocol/leave.h"
#include "targets/cuda/gemm/communicator.h"
#include "targets/cuda/gemm/stage_set.h"
#include "targets/cuda/worker.h"

namespace mok::cuda::gemm {

// A single thread that waits and publishes; the Worker of Tasks and Signals here.
class RoleWorker : public WaitingWorker<RoleWorker> {
 public:
  MOK_DEVICE RoleWorker(int32 launch_idx, int32 num_workers) : WaitingWorker(launch_idx), num_workers_(num_workers) {}
  MOK_DEVICE static bool is_leader() { return true; }
  MOK_DEVICE int32 num_workers() const { return num_workers_; }

 private:
  const int32 num_workers_;
};

// kGroup: what the kernel holds; 0 or a single stage: no communication.
template <class Arch, class Stages, Group kGroup>
class Roles {
 public:
  MOK_DEVICE Roles(Shared<Arch>& shared, const CallSet& set, const Launch& launch, const MapsOf<Stages>& maps)
      : shared_(shared), set_(set), launch_(launch), maps_(maps) {}

  MOK_DEVICE void run() {
    if (threadIdx.x == 0) {
      init_barriers();
      if (kHasComm) shared_.is_comm_cta = draw_role();
    }
    Arch::begin(shared_);
    const uint32 group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const uint32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (group == 0) {
      lower_registers<Arch::kRoleRegisters>();
      const bool is_comm_cta = kHasComm && shared_.is_comm_cta;
      if (!is_comm_cta && lane_idx() == 0) {
        if (warp == 0) produce();
        if (warp == 1 && Arch::is_first_cta()) schedule();
        if (warp == 2 && Arch::is_first_cta()) publish();
      }
      if (kHasComm && (is_comm_cta || (warp == 3 && num_comm_ctas() == 0))) communicate(shared_.ring_of(warp));
    } else if (!kHasComm || !shared_.is_comm_cta) {
      Arch::set_consumer_registers(group - 1);
      if (has_helpers()) help_communicator<kNumHelpers>(shared_.help());
      typename Arch::template Consumer<Stages> consumer(shared_, group - 1);
      for_each_call([&](int32, const Args& args) { consumer.run(args); });
    }
    Arch::end(shared_);
  }

 private:
  static constexpr bool kHasPrologue = kGroup == kWholeForward;
  static constexpr int kNumHelpers = Arch::kThreads - kRoleThreads;
  static constexpr bool kHasComm = (kGroup & stages_of(Work::copy)) != 0;

  // ---- CTAs and who leaves ----

  // Where a tile has several CTAs all of them multiply: roles are drawn per CTA.
  MOK_DEVICE int32 num_comm_ctas() const {
    return kHasComm && Arch::kCtasPerTile == 1 ? min_of(launch_.num_comm_ctas, static_cast<int32>(gridDim.x) / 2) : 0;
  }
  MOK_DEVICE bool draw_role() const {
    if (num_comm_ctas() == 0) return false;
    const Args args(set_.calls[0]);
    Word* counter = args.counter(Edge::tickets, role_counter(launch_));
    return only_communicates(static_cast<int32>(atomicAdd(counter, Word{1})), num_comm_ctas());
  }
  // Who leaves the kernel: publishers, and every warp that communicates.
  MOK_DEVICE int32 num_leaving() const {
    const int32 num_ctas = static_cast<int32>(gridDim.x), num_comm = num_comm_ctas();
    if (num_comm == 0) return num_ctas / Arch::kCtasPerTile + (kHasComm ? num_ctas : 0);
    return num_ctas - num_comm + num_comm * kCommWarps;
  }

  // Consumers help the communicator where there is nothing to multiply before the first rows are here.
  MOK_DEVICE bool has_helpers() const {
    const Shape& shape = set_.calls[0].shape;
    return kHasPrologue && num_comm_ctas() == 0 && shape.num_ranks > 1 && shape.shared_size == 0;
  }

  // ---- communication ----

  // Ranks that share this grid wait for each other's input, so all of them publish before any goes on.
  MOK_DEVICE void communicate(CommRing& ring) {
    CommWorker<kNumHelpers> worker(ring, launch_.launch_idx, num_leaving());
    MOK_TRACED(const uint32 warp = threadIdx.x / 32;)
    MOK_TRACED(worker.trace_to(shared_.timeline.track(TraceRole::communicator, warp));)
    MOK_TRACED(if (worker.is_leader()) shared_.timeline.open(launch_, TraceRole::communicator, warp);)
    if constexpr (kHasPrologue) {
      if (has_helpers()) worker.call_helpers(shared_.help());
      for_each_call([&](int32, const Args& args) {
        Launch launch;
        launch.launch_idx = launch_.launch_idx;
        run_communication<0>(args, launch, Tickets::publish, worker);
      });
    }
    // A pull waits for what other ranks' products leave, and those for their dispatch: that of all ranks comes first.
    constexpr bool kMayPullLast = holds(kGroup, Stage::dispatch) && holds(kGroup, Stage::combine);
    const Shape& shape = set_.calls[0].shape;
    const int32 num_passes = kMayPullLast && shape.is_pull_combine ? 2 : 1;
    for (int32 pass = 0; pass < num_passes; ++pass) {
      Launch launch = launch_;
      launch.has_prologue = false;
      if (num_passes == 2) launch.group = pass == 0 ? kGroup & ~group_bit(Stage::combine) : group_bit(Stage::combine);
      const Tickets tickets = pass == 0 ? Tickets::communication : Tickets::pull_combine;
      for_each_call([&](int32, const Args& args) {
        run_communication<kGroup>(args, launch, tickets, worker);  // dismisses the helpers
        if (pass + 1 == num_passes && worker.is_leader()) leave_last_group(args, launch_, worker);
      });
    }
  }

  MOK_DEVICE void init_barriers() {
    for (int i = 0; i < Arch::kOperandSlots; ++i) {
      mbarrier_init(address(&shared_.full[i]), 1);
      mbarrier_init(address(&shared_.empty[i]), Arch::kOperandReaders);
    }
    for (int i = 0; i < kTaskSlots; ++i) {
      mbarrier_init(address(&shared_.message_full[i]), 1);
      mbarrier_init(address(&shared_.message_empty[i]), Arch::kMessageReaders);
    }
    for (int i = 0; i < kTileSlots; ++i) mbarrier_init(address(&shared_.stored[i]), Arch::kStoringWarps);
    Arch::init_barriers(shared_);
    mbarrier_init_fence();
  }
  MOK_DEVICE static uint32 address(const void* pointer) { return smem_address(pointer); }

  // Calls `f(call index, args)` for the ranks of this GPU, in one order everywhere: who communicates may wait for the
  // products of a rank (for a free slot of its ring), and then those of no other rank come first.
  template <class F>
  MOK_DEVICE void for_each_call(F&& f) const {
    for (int32 index = 0; index < set_.num_calls; ++index) {
      const Args args(set_.calls[index]);
      f(index, args);
    }
  }

  // ---- scheduler: draws, decodes and waits, up to kTaskSlots tiles ahead of the others ----
  // Measured: with the wait in the producer, its poll and fences emptied the operand ring at every tile (about 7,000 cycles).
  MOK_DEVICE void schedule() {
    Position<kTaskSlots> slot;
    RoleWorker worker(launch_.launch_idx, num_leaving());
    MOK_TRACED(cuda::Track& track = shared_.timeline.open(launch_, TraceRole::scheduler);)
    MOK_TRACED(Position<kTileSlots> tile_slot; worker.trace_to(track);)
    for_each_call([&](int32, const Args& args) {
      MOK_TRACED(track.begin_call(args);)
      Signals<RoleWorker> signals(args, worker);
      Tasks tasks(args, launch_, kHasComm ? Role::compute : Role::any);
      bool has_task = true;
      while (has_task) {
        Task task;
        has_task = tasks.next(worker, &task);
        worker.begin_task(task);
        const bool is_ready = has_task && needs(args, task, signals);
        Arch::wait(address(&shared_.message_empty[slot.slot]), slot.phase ^ 1);
        MOK_TRACED(track.wait(task, InnerWait::message_slot);)
        Message& message = shared_.messages[slot.slot];
        message.state = !has_task ? kNoMoreTasks : is_ready ? kReady : kNotReady;
        if (has_task) {
          const GemmTile tile = decode(args.call, task);
          message.stage = static_cast<int32>(task.stage);
          message.block = task.block;
          message.part = task.part;
          message.num_rows = tile.num_rows;
          message.first_col = tile.first_col;
          message.num_cols = tile.num_cols;
          message.num_k = tile.num_k;
          message.expert = tile.expert;
          MOK_TRACED(shared_.timeline.post(tile_slot.slot); tile_slot.advance();)
        }
        Arch::send_message(shared_, slot.slot);
        slot.advance();
      }
    });
  }

  MOK_DEVICE static bool needs(const Args& args, const Task& task, Signals<RoleWorker>& signals) {
    if (Stages::is_swiglu(task.stage)) return Swiglu::needs(args, task, signals);
    bool is_ready = false;
    Stages::visit(task.stage, [&](auto s) { is_ready = decltype(s)::needs(args, task, signals); });
    return is_ready;
  }
  MOK_DEVICE static GemmTile decode(const Call& call, const Task& task) {
    GemmTile tile{};
    if (!Stages::is_swiglu(task.stage))
      Stages::visit(task.stage, [&](auto s) { tile = decltype(s)::decode(call, task); });
    return tile;
  }

  // ---- producer: keeps the operand ring full, across tiles ----
  MOK_DEVICE void produce() {
    Position<kTaskSlots> slot;
    Position<Arch::kOperandSlots> stage;
    MOK_TRACED(cuda::Track& track = shared_.timeline.open(launch_, TraceRole::producer);)
    for_each_call([&](int32 index, const Args& args) {
      MOK_TRACED(track.begin_call(args);)
      maps_.acquire(index);
      Task task;
      GemmTile tile;
      while (read_message<false>(shared_, slot, &task, &tile) != kNoMoreTasks) {
        MOK_TRACED(track.next_task(task);)
        if (Stages::is_swiglu(task.stage)) continue;
        fence_proxy_async();  // generic writes of others, acquired by the scheduler, before our TMA reads
        Stages::visit(task.stage, [&](auto s) { load<decltype(s)>(index, args.call, task, tile, stage); });
        MOK_TRACED(track.end(TraceKind::load, task);)
      }
    });
  }
  template <class S>
  MOK_DEVICE void load(int32 index, const Call& call, const Task& task, const GemmTile& tile,
                       Position<Arch::kOperandSlots>& stage) {
    for (int32 product = 0; product < S::kNumProducts; ++product) {
      const typename Arch::template Loader<S> loader(maps_.maps[index], S::operands(call, task, tile, product), tile);
      for (int32 k = 0; k < tile.num_k / S::kNumProducts; k += Arch::kBlockK) {
        mbarrier_wait(address(&shared_.empty[stage.slot]), stage.phase ^ 1);
        loader.load(shared_, stage.slot, address(&shared_.full[stage.slot]), k);
        stage.advance();
      }
    }
  }

  // ---- publisher: off everybody's critical path ----
  // Each warp arrives after its stores (release in the CTA); this thread's release is cumulative.
  MOK_DEVICE void publish() {
    Position<kTaskSlots> slot;
    Position<kTileSlots> tile_slot;
    RoleWorker worker(launch_.launch_idx, num_leaving());
    MOK_TRACED(cuda::Track& track = shared_.timeline.open(launch_, TraceRole::publisher);)
    MOK_TRACED(cuda::Track& consumers = shared_.timeline.open(launch_, TraceRole::consumers);)
    MOK_TRACED(worker.trace_to(track);)
    for_each_call([&](int32, const Args& args) {
      MOK_TRACED(track.begin_call(args); consumers.begin_call(args);)
      Signals<RoleWorker> signals(args, worker);
      Task task;
      GemmTile tile;
      for (;;) {
        const MessageState state = read_message<false>(shared_, slot, &task, &tile);
        if (state == kNoMoreTasks) break;
        MOK_TRACED(track.next_task(task);)
        Arch::wait(address(&shared_.stored[tile_slot.slot]), tile_slot.phase);
        MOK_TRACED(track.wait(task, InnerWait::stored_tile); shared_.timeline.add_tile(tile_slot.slot, task);)
        if (state == kReady) publishes(args, task, signals);
        MOK_TRACED(track.end(TraceKind::publish, task);)
        tile_slot.advance();
      }
      leave_last_group(args, launch_, worker);
    });
  }

  MOK_DEVICE static void publishes(const Args& args, const Task& task, Signals<RoleWorker>& signals) {
    if (Stages::is_swiglu(task.stage)) return Swiglu::publishes(args, task, signals);
    Stages::visit(task.stage, [&](auto s) { decltype(s)::publishes(args, task, signals); });
  }

  Shared<Arch>& shared_;
  const CallSet& set_;
  const Launch& launch_;
  const MapsOf<Stages>& maps_;
};

// A GEMM kernel: dynamic shared memory of sizeof(Shared<Arch>) + 1024, whatever the alignment of its start.
template <class Arch, class Stages, Group kGroup>
MOK_DEVICE void run_gemm_kernel(const CallSet& set, const Launch& launch,
                                const MapsOf<Stages>& maps MOK_TRACED(, const cuda::TraceSink& sink)) {
  extern __shared__ unsigned char raw[];
  const uint32 misalignment = smem_address(raw) % 1024;
  auto& shared = *reinterpret_cast<Shared<Arch>*>(raw + (misalignment ? 1024 - misalignment : 0));
  MOK_TRACED(if (threadIdx.x == 0) shared.timeline.sink = sink;)  // roles begin behind a barrier
  Roles<Arch, Stages, kGroup>(shared, set, launch, maps).run();
}

}  // namespace mok::cuda::gemm

#define MOK_ROLES_KERNEL(name, Stages, kGroup)                                                                    \
  extern "C" __global__ void MOK_GEMM_ATTRIBUTES __launch_bounds__(mok::cuda::gemm::TargetArch::kThreads, 1)      \
      mok_##name(const __grid_constant__ CallSet set, const __grid_constant__ Launch launch,                      \
                 const __grid_constant__ mok::cuda::gemm::MapsOf<Stages> maps MOK_TRACE_PARAMETER) {              \
    mok::cuda::gemm::run_gemm_kernel<mok::cuda::gemm::TargetArch, Stages, kGroup>(set, launch,                    \
                                                                                  maps MOK_TRACED(, trace_sink)); \
  }
#define MOK_COMMA ,
#define MOK_GEMM_KERNEL(name, S) MOK_ROLES_KERNEL(name, mok::cuda::gemm::StageSet<false MOK_COMMA S>, 0)
// The one of MOK_GROUP_MASK: a run-time compiler makes one kernel at a time. `StagesOf` as in targets/host/gemm_driver.h.
#define MOK_PERSISTENT_KERNELS(StagesOf) \
  MOK_ROLES_KERNEL(persistent, mok::cuda::gemm::ProductsOf<StagesOf<MOK_GROUP_MASK>>, MOK_GROUP_MASK)
