// What a call works on: the caller's tensors, the arguments of kernels, and what a failed one says. Host and device share
// these structs as they share layout.h.
#pragma once

#include "layout.h"

namespace mok {

// A built schedule: tensors of the caller, so that several may be alive at once.
struct Schedule {
  int32* peer_rank;          // [capacity_rows]      source rank of a row, -1 = padding
  int32* peer_token_idx;     // [capacity_rows]      token*K+k at the source, -1 = padding
  int32* segment_start;      // [El + 1]             rows; multiples of row_block
  int32* segment_num_rows;   // [El]                 without padding
  int32* row_block_expert;   // [capacity_blocks]    local expert of a row block
  int32* window_start;       // [max_windows + 1]    row blocks
  int32* generation_window;  // [max_generations + 1] first window of a generation
  int32* counts;             // [kNumCounts]
  int32* route_rank;         // [max_tokens * K]     owner of each of this rank's own routes, -1 = none
  int32* route_row;          // [max_tokens * K]     its row there
  int32* sorted_route;       // [max_tokens * K]     own routes by (expert, order): push dispatch's order
  int32* token_row;          // [R, token_row_stride] the first row of a peer's token here; with is_pull_once only
  int32 token_row_stride;    // max_tokens when it was built: a schedule stays valid when the workspace grows
};
enum ScheduleCount : int32 { kCountRows, kCountWindows, kCountRoutes, kCountWantedRows, kCountBuild, kNumCounts };

// What becomes of a weight gradient: a BF16 tensor of its own, or one addition into the caller's (BF16 or FP32).
enum class GradientMode : int32 { store, add_bf16, add_fp32 };
struct WeightGradients {
  GradientMode mode = GradientMode::store;
  void* routed_gate = nullptr;
  void* routed_up = nullptr;
  void* routed_down = nullptr;
  void* shared_gate = nullptr;
  void* shared_up = nullptr;
  void* shared_down = nullptr;
};

struct Tensors {
  const bf16* x;                // [T, H]
  const float* router_weights;  // [T, K]
  const bf16* w_shared_gate;    // [S, H]
  const bf16* w_shared_up;      // [S, H]
  const bf16* w_shared_down;    // [H, S]
  const bf16* w_routed_gate;    // [El, I, H]
  const bf16* w_routed_up;      // [El, I, H]
  const bf16* w_routed_down;    // [El, H, I]
  // The same two as gate_up_dgrad reads them, where they were quantized along another axis; null: there is but one.
  const bf16* w_dgrad_gate;
  const bf16* w_dgrad_up;
  const int32* top_experts;  // [T, K]           schedule only
  bf16* output;              // [T, H]           in a backward d_x
  // Context of macrobatch 0 (rows [ring_rows]); null: nothing is kept and the ring is used. A backward reads it.
  bf16* context_x;            // [ring_rows, H]
  bf16* context_gate;         // [ring_rows, I]
  bf16* context_up;           // [ring_rows, I]
  bf16* context_shared_gate;  // [T, S]
  bf16* context_shared_up;    // [T, S]
  // Of a backward.
  const bf16* d_output;  // [T, H]
  float* d_router;       // [T, K]
  // Gradients of the weights, in their shapes: all of one type, null where there is no such weight.
  WeightGradients d_weights;
  // What dgrad leaves for a wgrad apart, with a ring that holds all rows; null: the ring's own regions.
  bf16* saved_d_y;            // [ring_rows, H]
  bf16* saved_hidden;         // [ring_rows, I]  weight * h
  bf16* saved_d_gate;         // [ring_rows, I]
  bf16* saved_d_up;           // [ring_rows, I]
  bf16* saved_shared_hidden;  // [T, S]
  bf16* saved_shared_d_gate;  // [T, S]
  bf16* saved_shared_d_up;    // [T, S]
};

enum class CallKind : int32 { none, schedule, forward, recompute, backward, backward_dgrad, backward_wgrad };
constexpr const char* call_kind_name(CallKind kind) {
  constexpr const char* kNames[] = {"nothing",  "build_schedule", "forward",       "recompute_forward_context",
                                    "backward", "backward_dgrad", "backward_wgrad"};
  return kNames[static_cast<int>(kind)];
}

// The first wait of a rank that gave up, as a GPU target leaves it for the host (in pinned memory).
struct Failure {
  Word is_set;
  int32 reason;  // FailureReason
  int32 rank, stage, block, part, edge, peer, launch_idx;
  int64 index;
  Word have, want;
  int32 num_invalid_ids;  // expert ids out of range, taken as -1
  int32 raised_by;        // kFailureAborted: the rank that ended the call; edge is -1 if no wait was open here
};
enum FailureReason : int32 { kFailureTimeout = 1, kFailureMismatch = 2, kFailureCapacity = 3, kFailureAborted = 4 };

// The argument of every kernel of a call on one rank.
struct Call {
  Shape shape;
  CallKind kind = CallKind::none;
  uint32 fingerprint = 0;  // 16 bits over what all ranks must agree on
  int32 rank = 0;
  int32 num_tokens = 0;
  Group groups[kNumWindowed] = {};  // what the kernel that holds stage i holds
  bool has_swiglu_limit = false;
  float swiglu_limit = 0.0f;
  Schedule schedule = {};
  Tensors tensors = {};
  char* own[kNumRegions] = {};  // this rank's regions
  // Where an edge's counters start in bank 0, and how far bank 1 is: computed once by the host, since the sums
  // behind them are hundreds of instructions in every wait.
  int32 counter_start[kNumEdges] = {};
  int32 call_bank = 0, schedule_bank = 0;

  void place_counters() {
    for (int edge = 0; edge < kNumEdges; ++edge)
      counter_start[edge] = static_cast<int32>(counter_offset(static_cast<Edge>(edge), 0, shape));
    call_bank = static_cast<int32>(bank_size(false, shape));
    schedule_bank = static_cast<int32>(bank_size(true, shape));
  }
  char* const* regions = nullptr;  // [R][kNumRegions]; of a peer only symmetric ones are set
  // GPU targets only: where to say what failed, and how long a wait may last (0: for ever).
  Failure* failure = nullptr;
  Word timeout_ns = 0, start_timeout_ns = 0;

  template <class T>
  MOK_DEVICE T* at(Region region) const {
    return reinterpret_cast<T*>(own[static_cast<int>(region)]);
  }
  template <class T>
  MOK_DEVICE T* peer(Region region, int32 peer_rank) const {
    if (peer_rank == rank) return at<T>(region);
    return reinterpret_cast<T*>(regions[peer_rank * kNumRegions + static_cast<int>(region)]);
  }
  MOK_DEVICE bool is_backward() const {
    return kind == CallKind::backward || kind == CallKind::backward_dgrad || kind == CallKind::backward_wgrad;
  }
  // Whether input is copied to where peers read it: a wgrad apart has nothing that they need.
  MOK_DEVICE bool has_dgrad() const { return kind == CallKind::backward || kind == CallKind::backward_dgrad; }
  // A backward runs dispatch and gate_up again for what the context does not hold, if there can be such rows.
  MOK_DEVICE bool can_replay() const { return has_dgrad() && !shape.is_ring_complete(); }
  // Without peers nobody needs a published copy of x: a forward reads the caller's own tensor in its place.
  MOK_DEVICE bool is_input_in_place() const { return shape.num_ranks == 1 && !is_backward() && !shape.is_mxfp8_wire(); }
  void place_input() {
    if (is_input_in_place() && tensors.x)
      own[static_cast<int>(Region::x)] = reinterpret_cast<char*>(const_cast<bf16*>(tensors.x));
  }
  // One of the kernels of the call's plan.
  void add_group(Group group) {
    for (int i = 0; i < kNumWindowed; ++i)
      if (group >> i & 1u) groups[i] = group;
  }
  MOK_DEVICE bool share_kernel(Stage a, Stage b) const { return holds(groups[static_cast<int>(a)], b); }
};

// A kernel launch of a call.
struct Launch {
  Group group = 0;               // windowed stages, 0 for the others
  Stage stage = Stage::publish;  // which of the others, where group is 0
  int32 launch_idx = 0;          // its ticket and exit counters
  int32 generation = -1;         // counted in launch order; -1: all of them
  bool has_prologue = false;     // publish and the shared expert are tasks of this kernel
  int32 num_comm_ctas = 0;       // GPU: CTAs that only communicate; 0: spare warps do
  bool is_last_group = false;    // holds the rank's last remote access: sends done when its last worker leaves
  // A pull dispatch that ends before anybody uses its rows: no windows, the experts in turn (protocol/tasks.h).
  bool has_experts_in_turn = false;
};

// On one GPU one grid serves all ranks of a LocalGroup: its workers go through their calls in turn.
constexpr int kMaxLocalRanks = 8;
struct CallSet {
  int32 num_calls = 0;
  Call calls[kMaxLocalRanks];
};

}  // namespace mok
