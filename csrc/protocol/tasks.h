// The task sequence of a kernel: one order for all its workers, drawn by ticket.
//
// A task waits only for tasks before it in this order, for kernels launched earlier, for the publish of
// any rank, or (publish and reduce) for `done` of any rank. Hence any number of workers, from one
// up, finishes a call. Communication and compute workers draw from the same order, each skipping the
// other's tasks.
#pragma once

#include "protocol/arrivals.h"
#include "protocol/signals.h"

namespace mok {

struct Task {
  Stage stage = Stage::publish;
  int32 block = 0;  // row block, or token block of shared_*; unused by the copies of whole ranks
  int32 part = 0;   // column tile, or the task's number within its block
  // GEMM stages: local expert of the block (0: the shared one) and the block's rows without padding. Of a weight gradient:
  // the expert, the first of its row blocks in this macrobatch, and all its rows there without padding.
  int32 expert = 0;
  int32 num_rows = 0;
};

enum class Role : int32 { any, communication, compute };

// GPU: which CTAs of a launch only communicate. By arrival, since nobody knows which blocks are resident; in turns, so
// that of any two there are both kinds. Counted by launch: a call may have several such kernels.
MOK_DEVICE int64 role_counter(const Launch& launch) { return ticket_index(launch.launch_idx, Tickets::roles); }
MOK_DEVICE bool only_communicates(int32 arrival, int32 num_comm_ctas) {
  return arrival % 2 == 0 && arrival / 2 < num_comm_ctas;
}

// kMayTakeTurns: this kernel may be launched with has_experts_in_turn. Where it may not, that costs no registers.
template <bool kMayTakeTurns>
class TaskSequence {
 public:
  MOK_DEVICE TaskSequence(const Args& args, const Launch& launch, Role role)
      : TaskSequence(args, launch, role, role == Role::communication ? Tickets::communication : Tickets::tasks) {}
  // With tickets of its own, for a kernel that goes through a part of its communication apart.
  MOK_DEVICE TaskSequence(const Args& args, const Launch& launch, Role role, Tickets tickets)
      : args_(args), launch_(launch), role_(role), tickets_(tickets) {
    const Call& call = args.call;
    phase_ = launch.group == 0 ? kSingle : launch.has_prologue ? kPrologue : kGenerations;
    // Push dispatch and pull combine work for this rank as a source: they have tasks even where it owns no row. So have
    // weight gradients, which are then zero.
    const bool is_source = call.is_backward() || call.shape.is_push_dispatch || call.shape.is_pull_combine;
    num_generations_ = max_of(num_generations(call), is_source ? 1 : 0);
    if (call.kind == CallKind::recompute) num_generations_ = min_of(num_generations_, 1);
    generation_ = launch.generation < 0 ? 0 : launch.generation;
    end_generation_ = launch.generation < 0 ? num_generations_ : min_of(launch.generation + 1, num_generations_);
  }

  // Draws the next task; false: there is none, or the call was aborted.
  template <class Worker>
  MOK_DEVICE bool next(Worker& worker, Task* task) {
    const int64 counter = ticket_index(launch_.launch_idx, tickets_);
    const int64 ticket = static_cast<int64>(worker.draw(args_.counter(Edge::tickets, counter)));
    if (is_aborted(args_)) return false;  // after the draw: both loads are then under way together
    while (ticket >= chunk_begin_ + num_tasks_) {
      chunk_begin_ += num_tasks_;
      num_tasks_ = 0;
      piece_ = Piece{};
      if (!next_chunk()) return false;
    }
    decode(static_cast<int32>(ticket - chunk_begin_), task);
    return true;
  }

 private:
  enum Phase { kSingle, kPrologue, kGenerations, kEnd };

  // Moves to the next chunk: all tasks of one stage in one window.
  MOK_DEVICE bool next_chunk() {
    while (phase_ != kEnd) {
      const bool is_found = phase_ == kSingle     ? next_single()
                            : phase_ == kPrologue ? next_prologue()
                                                  : next_in_generations();
      if (!is_found) continue;
      const bool is_mine = role_ == Role::any || is_communication(stage_) == (role_ == Role::communication);
      if (is_mine && num_tasks_ > 0) return true;
      num_tasks_ = 0;
    }
    return false;
  }

  // A kernel of one stage that is not cut into windows.
  MOK_DEVICE bool next_single() {
    stage_ = launch_.stage;
    num_tasks_ = num_plain_tasks(args_.call, stage_);
    phase_ = kEnd;
    return true;
  }

  // publish first (it lets every other rank go on), then the shared expert, which hides the first transfer.
  MOK_DEVICE bool next_prologue() {
    if (step_ == kNumPrologue) {
      step_ = 0;
      phase_ = kGenerations;
      return false;
    }
    stage_ = static_cast<Stage>(static_cast<int32>(kFirstOfPrologue) + step_++);
    if (!is_of_pass(stage_, args_.call.is_backward())) return false;
    num_tasks_ = num_plain_tasks(args_.call, stage_);
    return true;
  }

  // Per generation: stage by stage over the windows, some of them one or two windows behind (window_lag), so that copies
  // and stores go on beside products.
  // The order restarts at each generation: going on across it would be cyclic for generations of one or two windows.
  MOK_DEVICE bool next_in_generations() {
    if (generation_ >= end_generation_) {
      phase_ = kEnd;
      return false;
    }
    const Call& call = args_.call;
    const int32 macrobatch = call.kind == CallKind::forward ? num_generations_ - 1 - generation_ : generation_;
    const bool is_empty = num_generations(call) == 0;
    first_window_ = is_empty ? 0 : call.schedule.generation_window[macrobatch];
    const int32 num_windows = is_empty ? 0 : call.schedule.generation_window[macrobatch + 1] - first_window_;
    // Step 0 and the last are for the tasks of this rank as a source; windows run between.
    const int32 num_steps = num_windows + lag(Stage::combine) + 2;
    while (step_ < num_steps) {
      const int32 step = step_, stage_idx = stage_idx_;
      if (++stage_idx_ == kNumWindowed) {
        stage_idx_ = 0;
        ++step_;
      }
      stage_ = static_cast<Stage>(stage_idx);
      if (!holds(launch_.group, stage_) || !has_stage(call, stage_, macrobatch)) continue;
      if (is_empty && stage_ == Stage::wgrad && step == num_steps - 1) {
        num_tasks_ = num_wgrad_tasks(0, 0);
        return true;
      }
      if (is_source_stage(call, stage_)) {
        if (step != (stage_ == Stage::dispatch ? 0 : num_steps - 1)) continue;
        num_tasks_ = num_plain_tasks(call, stage_);
        return true;
      }
      window_ = step - 1 - lag(stage_);
      if (window_ < 0 || window_ >= num_windows) continue;
      if (takes_turns() && window_ > 0) continue;  // all are in the first one's tasks
      num_tasks_ = takes_turns() ? begin_turns(num_windows) : num_window_tasks();
      return true;
    }
    step_ = 0;
    ++generation_;
    return false;
  }

  MOK_DEVICE int32 lag(Stage stage) const { return args_.call.shape.is_serial_ring ? 0 : window_lag(stage); }
  // A backward repeats dispatch and gate_up of what is not in the context; halves of it leave stages out.
  MOK_DEVICE static bool has_stage(const Call& call, Stage stage, int32 macrobatch) {
    if (!call.is_backward()) return true;
    if (stage == Stage::quantize) return call.shape.is_mxfp8() && call.kind != CallKind::backward_dgrad;
    if (stage == Stage::wgrad) return call.kind != CallKind::backward_dgrad;
    if (!call.has_dgrad()) return false;
    return macrobatch > 0 || !holds(kReplay, stage);
  }
  MOK_DEVICE static bool is_source_stage(const Call& call, Stage stage) {
    return (stage == Stage::dispatch && call.shape.is_push_dispatch) ||
           (stage == Stage::combine && call.shape.is_pull_combine);
  }

 public:
  // Tasks of the stages that are not cut into windows.
  MOK_DEVICE static int32 num_plain_tasks(const Call& call, Stage stage) {
    const Shape& s = call.shape;
    // The shared expert: in a backward for gradients of activations.
    if (is_shared_product(stage)) {
      const bool has_product = s.shared_size && (!call.is_backward() || call.has_dgrad());
      return has_product ? ceil_div(call.num_tokens, s.row_block()) * num_block_tasks(stage, s) : 0;
    }
    switch (stage) {
      case Stage::publish:
        return num_publish_tasks(call);
      case Stage::dispatch:
        return ceil_div(call.schedule.counts[kCountRoutes], kCopyRows);
      case Stage::combine:
        return ceil_div(call.num_tokens * s.topk, kCopyRows);
      case Stage::shared_wgrad:
        return call.kind != CallKind::backward_dgrad && s.shared_size ? num_wgrad_tiles(s.hidden_size, s.shared_size)
                                                                      : 0;
      case Stage::reduce: {
        const bool has_output = call.kind == CallKind::forward || call.has_dgrad();
        return has_output ? max_of(1, ceil_div(call.num_tokens, kReduceTokens)) : 1;
      }
      default:
        return 0;
    }
  }

 private:
  MOK_DEVICE int32 num_parts() const { return num_block_tasks(stage_, args_.call.shape); }
  MOK_DEVICE int32 num_window_tasks() {
    if (has_no_tasks(stage_, args_.call)) return 0;
    const int32* start = args_.call.schedule.window_start + first_window_ + window_;
    if (stage_ == Stage::wgrad) return num_wgrad_tasks(start[0], start[1]);
    return (start[1] - start[0]) * num_parts();
  }

  // A window's weight gradients: those of the experts whose rows in this macrobatch end in it, and of the experts
  // without rows between them. An expert that goes on in the next macrobatch has tasks in both.
  MOK_DEVICE int32 num_wgrad_tasks(int32 begin_block, int32 end_block) {
    const Shape& s = args_.call.shape;
    first_expert_ = first_unfinished_expert(begin_block);
    int32 end_expert = s.num_local_experts;
    if (end_block < num_rows(args_.call) / s.row_block()) {
      end_expert = first_unfinished_expert(end_block);
      const bool is_cut = end_expert == args_.call.schedule.row_block_expert[end_block - 1];
      if (is_cut && end_block % (s.ring_rows / s.row_block()) == 0) ++end_expert;
    }
    return (end_expert - first_expert_) * num_wgrad_tiles(s.hidden_size, s.intermediate_size);
  }
  // The first expert that has not all its rows before a row block.
  MOK_DEVICE int32 first_unfinished_expert(int32 block) const {
    if (block == 0) return 0;
    const Schedule& schedule = args_.call.schedule;
    const int32 before = schedule.row_block_expert[block - 1];
    return schedule.segment_start[before + 1] / args_.call.shape.row_block() > block ? before : before + 1;
  }
  MOK_DEVICE void decode_wgrad(int32 index, Task* task) const {
    const Call& call = args_.call;
    const Shape& s = call.shape;
    const int32 tiles = num_wgrad_tiles(s.hidden_size, stage_ == Stage::wgrad ? s.intermediate_size : s.shared_size);
    task->part = index % tiles;
    task->num_rows = call.num_tokens;
    if (stage_ == Stage::shared_wgrad) return;
    task->expert = first_expert_ + index / tiles;
    const BlockRange blocks = expert_blocks(call, task->expert, generation_);
    const int32 end_row = call.schedule.segment_start[task->expert] + call.schedule.segment_num_rows[task->expert];
    task->block = blocks.first < blocks.end ? blocks.first : 0;
    task->num_rows = max_of(0, min_of(blocks.end * s.row_block(), end_row) - blocks.first * s.row_block());
  }

  MOK_DEVICE void decode(int32 index, Task* task) {
    const Call& call = args_.call;
    task->stage = stage_;
    task->block = 0;
    task->part = index;
    task->expert = 0;
    task->num_rows = 0;
    if (stage_ == Stage::wgrad || stage_ == Stage::shared_wgrad) return decode_wgrad(index, task);
    if (stage_ == Stage::publish || stage_ == Stage::reduce || is_source_stage(call, stage_)) return;
    if (is_shared_product(stage_)) {
      if (piece_.num_tasks == 0)
        piece_ = Piece{0, num_tasks_, 0, ceil_div(call.num_tokens, call.shape.row_block()), 0, call.num_tokens};
      return decode_in_piece(index, task);
    }
    if (is_routed_product(stage_)) {
      while (index >= piece_.first + piece_.num_tasks) next_piece();
      return decode_in_piece(index, task);
    }
    task->block = takes_turns() ? block_in_turn(index / num_parts())
                                : call.schedule.window_start[first_window_ + window_] + index / num_parts();
    task->part = index % num_parts();
  }

  // Turn t: row block t of every expert that has as many in this generation. An expert's rows are in the order of tokens, so
  // that a token's rows, which are spread over the experts, are read at about the same time: from memory once, then
  // from the cache. (In order of experts they come from memory again; measured in docs/hopper.md.)
  MOK_DEVICE bool takes_turns() const { return kMayTakeTurns && launch_.has_experts_in_turn; }
  struct Turn {
    int32 idx = 0, first = 0, num_blocks = 0;  // `first`: row blocks of the turns before
    int32 begin_block = 0, end_block = 0;      // of the generation
  };
  MOK_DEVICE int32 begin_turns(int32 num_windows) {
    const int32* start = args_.call.schedule.window_start + first_window_;
    turn_ = Turn{0, 0, 0, start[0], start[num_windows]};
    turn_.num_blocks = num_experts_in_turn(0);
    return (turn_.end_block - turn_.begin_block) * num_parts();
  }
  // The expert's row block of the turn, negative if it has none.
  MOK_DEVICE int32 block_of_expert(int32 turn, int32 expert) const {
    const int32* start = args_.call.schedule.segment_start + expert;
    const int32 rows = args_.call.shape.row_block();
    const int32 block = max_of(start[0] / rows, turn_.begin_block) + turn;
    return block < min_of(start[1] / rows, turn_.end_block) ? block : -1;
  }
  MOK_DEVICE int32 num_experts_in_turn(int32 turn) const {
    int32 count = 0;
    for (int32 expert = 0; expert < args_.call.shape.num_local_experts; ++expert)
      count += block_of_expert(turn, expert) >= 0;
    return count;
  }
  MOK_DEVICE int32 block_in_turn(int32 index) {
    while (index >= turn_.first + turn_.num_blocks) {
      turn_.first += turn_.num_blocks;
      turn_.num_blocks = num_experts_in_turn(++turn_.idx);
    }
    int32 expert = -1, block = -1;
    for (int32 left = index - turn_.first; left >= 0; left -= block >= 0) block = block_of_expert(turn_.idx, ++expert);
    return block;
  }

  // GEMM tasks of a window: expert by expert; inside an expert rows fastest, so that a column tile of weights is read
  // once. An expert whose rows would not stay in the L2 while its columns go by is done in groups of rows.
  // The piece at hand is kept, since the tables cost a dependent load each and tickets come in order.
  struct Piece {
    int32 first = 0, num_tasks = 0;  // of the chunk's tasks
    int32 first_block = 0, num_blocks = 0;
    int32 expert = 0, end_row = 0;  // end_row: behind the last row that is not padding
  };
  MOK_DEVICE void next_piece() {
    const Schedule& schedule = args_.call.schedule;
    const int32* window = schedule.window_start + first_window_ + window_;
    piece_.first += piece_.num_tasks;
    piece_.first_block = piece_.first == 0 ? window[0] : piece_.first_block + piece_.num_blocks;
    piece_.expert = schedule.row_block_expert[piece_.first_block];
    const int32 end_block = schedule.segment_start[piece_.expert + 1] / args_.call.shape.row_block();
    piece_.num_blocks = num_group_blocks(min_of(window[1], end_block) - piece_.first_block);
    piece_.end_row = schedule.segment_start[piece_.expert] + schedule.segment_num_rows[piece_.expert];
    piece_.num_tasks = piece_.num_blocks * num_parts();
  }
  // Row blocks of the next group, of those that are left: about kGroupBytes of the rows' operand, in equal parts.
  MOK_DEVICE int32 num_group_blocks(int32 num_left) const {
    const Shape& s = args_.call.shape;
    const int32 num_k = stage_ == Stage::gate_up || stage_ == Stage::down_dgrad ? s.hidden_size : s.intermediate_size;
    const int32 wanted = max_of(1, kGroupBytes / (s.row_block() * static_cast<int32>(sizeof(bf16)) * num_k));
    return ceil_div(num_left, max_of(1, (num_left + wanted / 2) / wanted));
  }
  MOK_DEVICE void decode_in_piece(int32 index, Task* task) const {
    const int32 row_block = args_.call.shape.row_block(), at = index - piece_.first;
    task->block = piece_.first_block + at % piece_.num_blocks;
    task->part = at / piece_.num_blocks;
    task->expert = piece_.expert;
    task->num_rows = max_of(0, min_of(row_block, piece_.end_row - task->block * row_block));
  }

  static constexpr int32 kGroupBytes = MOK_GROUP_BYTES;

  const Args& args_;
  const Launch& launch_;
  Role role_;
  Tickets tickets_;
  Phase phase_;
  int32 num_generations_, generation_, end_generation_;
  int32 step_ = 0, stage_idx_ = 0;
  int32 first_window_ = 0, window_ = 0;
  int32 first_expert_ = 0;  // of a chunk of weight gradients
  Stage stage_ = Stage::publish;
  int64 chunk_begin_ = 0;
  int32 num_tasks_ = 0;
  Piece piece_;
  Turn turn_;
};
using Tasks = TaskSequence<false>;

}  // namespace mok
