// The roster: one table of stages and one of edges. Enums, names, counts and sets follow from them, in C++ and in Python
// (`_host.roster()`); no other file lists stages or edges, and this one includes no stage. docs/adding-a-stage.md adds a
// row to each.
#pragma once

#include "numeric.h"

namespace mok {

// ---- stages, in data-flow order -------------------------------------------------------------

// X(name, Type, file, place, pass, work, tasks, lag, inside)
//   name         enumerator of Stage, name in messages and tables, kernel of csrc/split
//   Type         the struct that does its tasks
//   file         stages/<file>.h, split/<file>.cu and mok_modular/stages/<file>.py
//   place        windowed: window by window through the ring (these come first: their numbers are the bits of a Group)
//                prologue: before the windows    last: ends a call    apart: a call of its own
//   pass         replayed: a forward's that a backward repeats for rows that the context does not hold
//                forward, backward: of one pass; a plan distributes those that are windowed over kernels
//                forward_end: a kernel of its own after the plan's in a generation (none today; the toy of
//                docs/adding-a-stage.md)
//                wgrad: of a backward and of a wgrad-only call, kernels of their own after the plan's
//                every: of every call
//   work         copy: communication workers do it    element, product, wgrad (sums over rows)    index: of expert ids
//   tasks        of one row block (token block of the shared expert): see num_tasks in protocol/arrivals.h
//   lag          windows after the first stage, where several stages share a kernel; see protocol/ring.h
//   inside       the stage whose tasks do this one's too where both share a kernel (epilogue or stores)
#define MOK_STAGES(X)                                                                                                 \
  X(dispatch, Dispatch, dispatch, windowed, replayed, copy, copies, 0, none)                                          \
  X(gate_up, GateUp, grouped_gemm, windowed, replayed, product, gate_up_tiles, 0, none)                               \
  X(swiglu, Swiglu, swiglu, windowed, forward, element, elements, 0, gate_up)                                         \
  X(down, Down, grouped_gemm, windowed, forward, product, down_tiles, 2, none)                                        \
  X(combine, Combine, combine, windowed, forward, copy, copies, 2, down)                                              \
  X(reverse_combine, ReverseCombine, reverse_combine, windowed, backward, copy, copies, 0, none)                      \
  X(down_dgrad, DownDgrad, grouped_dgrad, windowed, backward, product, down_dgrad_tiles, 0, none)                     \
  X(swiglu_backward, SwigluBackward, swiglu_backward, windowed, backward, element, elements, 0, down_dgrad)           \
  X(gate_up_dgrad, GateUpDgrad, grouped_dgrad, windowed, backward, product, down_tiles, 1, none)                      \
  X(reverse_dispatch, ReverseDispatch, reverse_dispatch, windowed, backward, copy, copies, 1, gate_up_dgrad)          \
  X(quantize, Quantize, quantize, windowed, wgrad, element, elements, 1, none)                                        \
  X(wgrad, Wgrad, wgrad, windowed, wgrad, wgrad, other, 1, none)                                                      \
  X(schedule, ScheduleStage, schedule, apart, every, index, other, 0, none)                                           \
  X(publish, Publish, publish, prologue, every, copy, other, 0, none)                                                 \
  X(shared_gate_up, SharedGateUp, grouped_gemm, prologue, forward, product, shared_gate_up_tiles, 0, none)            \
  X(shared_down, SharedDown, grouped_gemm, prologue, forward, product, down_tiles, 0, none)                           \
  X(shared_down_dgrad, SharedDownDgrad, grouped_dgrad, prologue, backward, product, shared_down_dgrad_tiles, 0, none) \
  X(shared_gate_up_dgrad, SharedGateUpDgrad, grouped_dgrad, prologue, backward, product, down_tiles, 0, none)         \
  X(shared_wgrad, SharedWgrad, wgrad, prologue, wgrad, wgrad, other, 0, none)                                         \
  X(reduce, Reduce, reduce, last, every, element, other, 0, none)

#define MOK_STAGE_ENUMERATOR(name, ...) name,
enum class Stage : int32 { MOK_STAGES(MOK_STAGE_ENUMERATOR) kCount, none = kCount };
#undef MOK_STAGE_ENUMERATOR
constexpr int kNumStages = static_cast<int>(Stage::kCount);

enum class Place : int32 { windowed, prologue, last, apart };
enum class Pass : int32 { replayed, forward, forward_end, backward, wgrad, every };
enum class Work : int32 { copy, element, product, wgrad, index };
enum class BlockTasks : int32 {
  copies,
  elements,
  gate_up_tiles,
  down_tiles,
  down_dgrad_tiles,
  shared_gate_up_tiles,
  shared_down_dgrad_tiles,
  other,  // not by blocks
};

struct StageRow {
  const char *name, *file;
  Place place;
  Pass pass;
  Work work;
  int32 lag;
  Stage inside;
};
#define MOK_STAGE_ROW(name, Type, file, place, pass, work, tasks, lag, inside) \
  {#name, #file, Place::place, Pass::pass, Work::work, lag, Stage::inside},
constexpr StageRow kStages[kNumStages] = {MOK_STAGES(MOK_STAGE_ROW)};
#undef MOK_STAGE_ROW

constexpr const StageRow& row_of(Stage stage) { return kStages[static_cast<int>(stage)]; }
constexpr const char* stage_name(Stage stage) { return row_of(stage).name; }

// A set of stages, by their numbers. Of windowed ones alone it is a Group: what one kernel holds.
using StageMask = uint64;
using Group = uint32;
constexpr StageMask stage_bit(Stage stage) { return StageMask{1} << static_cast<int>(stage); }
constexpr Group group_bit(Stage stage) { return 1u << static_cast<int>(stage); }
constexpr bool holds(Group group, Stage stage) { return (group & group_bit(stage)) != 0; }
// All stages from one to another.
constexpr Group group_of(Stage first, Stage last) {
  return (2u << static_cast<int>(last)) - (1u << static_cast<int>(first));
}

template <class Predicate>
constexpr StageMask stages_where(Predicate&& is_in) {
  StageMask mask = 0;
  for (int i = 0; i < kNumStages; ++i)
    if (is_in(kStages[i])) mask |= StageMask{1} << i;
  return mask;
}
constexpr int count_of(StageMask mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) ++count;
  return count;
}
constexpr StageMask stages_of(Place place) {
  return stages_where([place](const StageRow& row) { return row.place == place; });
}
constexpr StageMask stages_of(Work work) {
  return stages_where([work](const StageRow& row) { return row.work == work; });
}
constexpr Group group_of(Pass pass) {
  return static_cast<Group>(
      stages_where([pass](const StageRow& row) { return row.place == Place::windowed && row.pass == pass; }));
}

constexpr StageMask kEveryStage = (StageMask{1} << kNumStages) - 1;
constexpr StageMask kWindowedStages = stages_of(Place::windowed);
constexpr int kNumWindowed = count_of(kWindowedStages);
static_assert(kWindowedStages == (StageMask{1} << kNumWindowed) - 1, "windowed stages come first in the roster");
static_assert(kNumWindowed <= 32 && kNumStages <= 64);

constexpr bool is_backward(Pass pass) { return pass == Pass::backward || pass == Pass::wgrad; }

constexpr Stage first_of(StageMask mask) {
  int i = 0;
  while ((mask >> i & 1) == 0) ++i;
  return static_cast<Stage>(i);
}
constexpr Group kReplay = group_of(Pass::replayed);
// What a plan distributes over kernels: of a forward, and of the backward that mirrors it.
constexpr Group kPlanned = kReplay | group_of(Pass::forward), kMirrored = group_of(Pass::backward);
constexpr Group kWholeForward = kPlanned | group_of(Pass::forward_end);
constexpr Group kWholeBackward = kReplay | kMirrored | group_of(Pass::wgrad);
static_assert(count_of(kPlanned) == count_of(kMirrored));
// The prologue's stages have neighbouring numbers, in the order of their tasks.
constexpr Stage kFirstOfPrologue = first_of(stages_of(Place::prologue));
constexpr int kNumPrologue = count_of(stages_of(Place::prologue));
static_assert(stages_of(Place::prologue) >> static_cast<int>(kFirstOfPrologue) == (StageMask{1} << kNumPrologue) - 1);
constexpr int kMaxWindowedOfPass = count_of(kWholeForward) > count_of(kWholeBackward) ? count_of(kWholeForward)
                                                                                      : count_of(kWholeBackward);

// The backward's group that mirrors a forward's: the same stages, last to first.
constexpr Group mirror(Group group) {
  const int first = static_cast<int>(first_of(kPlanned)), first_mirrored = static_cast<int>(first_of(kMirrored));
  const int num = count_of(kPlanned);
  Group mirrored = 0;
  for (int i = 0; i < num; ++i)
    if (group >> (first + i) & 1) mirrored |= 1u << (first_mirrored + num - 1 - i);
  return mirrored;
}

#define MOK_OR_TASKS(name, Type, file, place, pass, work, tasks, ...) \
  || (BlockTasks::tasks == kTasks && stage == Stage::name)
template <BlockTasks kTasks>
MOK_DEVICE bool has_tasks(Stage stage) {
  return false MOK_STAGES(MOK_OR_TASKS);
}
#undef MOK_OR_TASKS
constexpr bool is_windowed(Stage stage) { return row_of(stage).place == Place::windowed; }
constexpr bool is_product(Stage stage) {
  return row_of(stage).work == Work::product || row_of(stage).work == Work::wgrad;
}

// All that a kernel of a group has tasks of: with all stages of a pass, the prologue too.
constexpr StageMask stages_in_kernel(Group group) {
  const bool is_forward = group == kWholeForward, is_backward_kernel = group == kWholeBackward;
  return group | stages_where([&](const StageRow& row) {
           return row.place == Place::prologue && (row.pass == Pass::every ? is_forward || is_backward_kernel
                                                   : is_backward(row.pass) ? is_backward_kernel
                                                                           : is_forward);
         });
}

// The groups of several stages that plans have: all contiguous ones of a pass; the whole pass with what is always last.
constexpr int kNumPlanGroups = count_of(kPlanned) * (count_of(kPlanned) - 1);
struct PlanGroups {
  Group groups[kNumPlanGroups] = {};
};
constexpr PlanGroups make_plan_groups() {
  PlanGroups out;
  int num = 0;
  constexpr Group kPasses[] = {kPlanned, kMirrored};
  for (const Group whole : kPasses) {
    const int begin = static_cast<int>(first_of(whole)), end = begin + count_of(whole);
    for (int first = begin; first < end; ++first)
      for (int last = first + 1; last < end; ++last) {
        const Group group = group_of(static_cast<Stage>(first), static_cast<Stage>(last));
        out.groups[num++] = group == kPlanned ? kWholeForward : group == kMirrored ? kWholeBackward : group;
      }
  }
  return out;
}
constexpr PlanGroups kPlanGroups = make_plan_groups();

// Done by communication workers, where a kernel has workers of both kinds.
#define MOK_OR_COPY(name, Type, file, place, pass, work, ...) || (Work::work == Work::copy && stage == Stage::name)
MOK_DEVICE bool is_communication(Stage stage) { return false MOK_STAGES(MOK_OR_COPY); }
#undef MOK_OR_COPY
// Products over the tokens of this rank, which need no transfer.
#define MOK_OR_SHARED(name, Type, file, place, pass, work, ...) \
  || (Place::place == Place::prologue && Work::work == Work::product && stage == Stage::name)
MOK_DEVICE bool is_shared_product(Stage stage) { return false MOK_STAGES(MOK_OR_SHARED); }
#undef MOK_OR_SHARED
// Whether a call has tasks of a stage of the prologue.
#define MOK_OR_OF_PASS(name, Type, file, place, pass, ...) \
  || ((Pass::pass == Pass::every || is_backward(Pass::pass) == is_of_backward) && stage == Stage::name)
MOK_DEVICE bool is_of_pass(Stage stage, bool is_of_backward) { return false MOK_STAGES(MOK_OR_OF_PASS); }
#undef MOK_OR_OF_PASS
#define MOK_OR_ROUTED(name, Type, file, place, pass, work, ...) \
  || (Place::place == Place::windowed && Work::work == Work::product && stage == Stage::name)
MOK_DEVICE bool is_routed_product(Stage stage) { return false MOK_STAGES(MOK_OR_ROUTED); }
#undef MOK_OR_ROUTED

// ---- edges ----------------------------------------------------------------------------------

// X(name, scope, epoch, cells, pass, arrivals, writers, readers); protocol/README.md says why each is there
//   scope     ranks: words with one writer each, SET to an epoch, never cleared    start: such words that ranks send as
//             soon as they come, so that only a late rank can delay them
//             rank: counters inside a rank that many workers add to, in two banks; the next call of the kind clears its own
//   epoch     call, schedule, order: whose number the words hold, or whose parity chooses the bank
//   cells     how many words a rank has from each rank, or counters in a bank: names of Cells
//   pass      every, or backward: no counters where the workspace has no backward
//   arrivals  the stages whose tasks complete one cell, of the pass at hand; () where the count is made elsewhere
//   writers   the stages whose tasks publish it    readers   and those that wait for it    every: any of a kernel's
#define MOK_EDGES(X)                                                                                            \
  X(entered, start, order, two_words, every, (), (publish, schedule), (dispatch))                               \
  X(topk_ready, start, schedule, one_word, every, (), (schedule), (schedule))                                   \
  X(input_ready, start, call, one_word, every, (), (publish), (dispatch, reverse_combine))                      \
  X(done, ranks, call, two_words, every, (), (every), (publish, reduce))                                        \
  X(x_arrived, ranks, call, block_words, every, (), (dispatch), (gate_up))                                      \
  X(y_arrived, ranks, call, block_words, every, (), (down), (combine))                                          \
  X(x_ready, rank, call, row_blocks_or_slots, every, (dispatch), (dispatch), (dispatch, gate_up))               \
  X(gate_up_ready, rank, call, row_blocks, every, (gate_up), (gate_up), (swiglu, swiglu_backward, down_dgrad))  \
  X(hidden_ready, rank, call, row_blocks, every, (swiglu), (gate_up, swiglu), (down))                           \
  X(y_ready, rank, call, row_blocks_or_slots, every, (down), (down), (combine))                                 \
  X(slot_free, rank, call, slots, every, (combine, reverse_dispatch),                                           \
    (down, combine, gate_up_dgrad, reverse_dispatch, wgrad), (dispatch, reverse_combine))                       \
  X(shared_hidden_ready, rank, call, token_blocks, every, (shared_gate_up), (shared_gate_up), (shared_down))    \
  X(shared_ready, rank, call, token_blocks, every, (shared_down, shared_gate_up_dgrad),                         \
    (shared_down, shared_gate_up_dgrad), (reduce))                                                              \
  X(d_y_ready, rank, call, row_blocks_or_slots, backward, (reverse_combine), (reverse_combine), (down_dgrad))   \
  X(d_hidden_ready, rank, call, row_blocks, backward, (down_dgrad), (down_dgrad), (swiglu_backward))            \
  X(d_gate_up_ready, rank, call, row_blocks, backward, (swiglu_backward), (down_dgrad, swiglu_backward),        \
    (gate_up_dgrad, quantize))                                                                                  \
  X(d_x_ready, rank, call, row_blocks_or_slots, backward, (gate_up_dgrad), (gate_up_dgrad), (reverse_dispatch)) \
  X(segment_ready, rank, call, segments, backward, (swiglu_backward), (down_dgrad, swiglu_backward, quantize),  \
    (wgrad))                                                                                                    \
  X(carry_done, rank, call, carries, backward, (), (wgrad), (wgrad))                                            \
  X(shared_d_gate_up_ready, rank, call, token_blocks, backward, (shared_down_dgrad), (shared_down_dgrad),       \
    (shared_gate_up_dgrad, shared_wgrad))                                                                       \
  X(published, rank, call, one, every, (), (publish), (every))                                                  \
  X(pushed, rank, call, owner_blocks, every, (), (dispatch), ())                                                \
  X(tickets, rank, call, launch_tickets, every, (), (), ())                                                     \
  X(exited, rank, call, launches, every, (), (every), ())                                                       \
  X(ids_pushed, rank, schedule, one, every, (), (schedule), ())                                                 \
  X(ids_counted, rank, schedule, one, every, (), (schedule), (schedule))                                        \
  X(laid_out, rank, schedule, one, every, (), (schedule), (schedule))                                           \
  X(schedule_tickets, rank, schedule, two, every, (), (), ())                                                   \
  X(schedule_exited, rank, schedule, one, every, (), (schedule), ())

#define MOK_EDGE_ENUMERATOR(name, ...) name,
enum class Edge : int32 { MOK_EDGES(MOK_EDGE_ENUMERATOR) kCount };
#undef MOK_EDGE_ENUMERATOR
constexpr int kNumEdges = static_cast<int>(Edge::kCount);

enum class Scope : int32 { start, ranks, rank };
enum class Epoch : int32 { call, schedule, order };
enum class Cells : int32 {
  // of an edge across ranks
  one_word,
  two_words,    // by parity of the epoch
  block_words,  // one for each row block, in Region::arrivals
  // of an edge inside a rank
  one,
  two,
  row_blocks,
  row_blocks_or_slots,  // the same number; one counter may serve a minibatch slot (signal_grain)
  slots,
  token_blocks,
  segments,      // by macrobatch and local expert
  carries,       // by macrobatch and unit of the carry
  owner_blocks,  // by owner of the row and its row block; with push dispatch
  launches,
  launch_tickets,  // see Tickets
};
struct EdgeRow {
  const char* name;
  Scope scope;
  Epoch epoch;
  Cells cells;
  Pass pass;
};
#define MOK_EDGE_ROW(name, scope, epoch, cells, pass, ...) \
  {#name, Scope::scope, Epoch::epoch, Cells::cells, Pass::pass},
constexpr EdgeRow kEdges[kNumEdges] = {MOK_EDGES(MOK_EDGE_ROW)};
#undef MOK_EDGE_ROW

constexpr const EdgeRow& row_of(Edge edge) { return kEdges[static_cast<int>(edge)]; }
constexpr const char* edge_name(Edge edge) { return row_of(edge).name; }

template <class Predicate>
constexpr uint64 edges_where(Predicate&& is_in) {
  uint64 mask = 0;
  for (int i = 0; i < kNumEdges; ++i)
    if (is_in(kEdges[i])) mask |= uint64{1} << i;
  return mask;
}
static_assert(kNumEdges <= 64);
constexpr uint64 kEdgesAcrossRanks = edges_where([](const EdgeRow& row) { return row.scope != Scope::rank; });
constexpr uint64 kScheduleEdges = edges_where([](const EdgeRow& row) { return row.epoch == Epoch::schedule; });
// Comparisons with bounds: cheaper on a device than a look into a mask.
constexpr int kNumAcrossRanks = count_of(kEdgesAcrossRanks);
constexpr int kFirstScheduleCounter = kNumEdges - count_of(kScheduleEdges & ~kEdgesAcrossRanks);
static_assert(kEdgesAcrossRanks == (uint64{1} << kNumAcrossRanks) - 1, "edges across ranks come first in the roster");
static_assert((kScheduleEdges & ~kEdgesAcrossRanks) >> kFirstScheduleCounter ==
                  (uint64{1} << (kNumEdges - kFirstScheduleCounter)) - 1,
              "the counters of a schedule come last in the roster");
MOK_DEVICE bool is_cross_rank(Edge edge) { return static_cast<int>(edge) < kNumAcrossRanks; }
#define MOK_OR_SCHEDULE(name, scope, epoch, ...) \
  || (Scope::scope != Scope::rank && Epoch::epoch == Epoch::schedule && edge == Edge::name)
MOK_DEVICE bool is_schedule_edge(Edge edge) {
  return static_cast<int>(edge) >= kFirstScheduleCounter MOK_EDGES(MOK_OR_SCHEDULE);
}
#undef MOK_OR_SCHEDULE
#define MOK_OR_START(name, scope, ...) || (Scope::scope == Scope::start && edge == Edge::name)
MOK_DEVICE bool is_start_edge(Edge edge) { return false MOK_EDGES(MOK_OR_START); }
#undef MOK_OR_START
#define MOK_OR_ORDER(name, scope, epoch, ...) || (Epoch::epoch == Epoch::order && edge == Edge::name)
MOK_DEVICE bool is_order_edge(Edge edge) { return false MOK_EDGES(MOK_OR_ORDER); }
#undef MOK_OR_ORDER
#define MOK_OR_GRAIN(name, scope, epoch, cells, ...) \
  || (Cells::cells == Cells::row_blocks_or_slots && edge == Edge::name)
MOK_DEVICE bool has_grain(Edge edge) { return false MOK_EDGES(MOK_OR_GRAIN); }
#undef MOK_OR_GRAIN

// Words that a rank has from each other one on the edges before this: where its own begin, times the number of ranks.
constexpr int words_before(Edge edge) {
  int total = 0;
  for (int i = 0; i < static_cast<int>(edge); ++i)
    total += kEdges[i].cells == Cells::one_word ? 1 : kEdges[i].cells == Cells::two_words ? 2 : 0;
  return total;
}
constexpr int kNumWords = words_before(Edge::kCount);

}  // namespace mok
