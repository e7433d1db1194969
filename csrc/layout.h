// Every region, tensor and struct that host, device and Python share, once.
// Python asks this file for sizes and names; it never does address arithmetic of its own.
#pragma once

#include "numeric.h"
#include "protocol/roster.h"

namespace mok {

constexpr int kMaxRanks = 128;

// ---- sizes ----------------------------------------------------------------------------------

// Rows per task of the copy stages and of standalone swiglu; tokens per task of reduce. Fixed here because writers and readers of a signal must agree on them.
constexpr int kCopyRows = 16;
constexpr int kPublishRows = 8;
constexpr int kElementRows = 32;
constexpr int kReduceTokens = 8;
// Top-k ids per task of schedule: a place task compares each id with those before it in the chunk.
constexpr int kScheduleChunk = 256;
// Output columns of a GEMM task, by the target's tile (accumulator columns: twice that for gate_up).
constexpr int kGateUpCols = MOK_TILE_COLS / 2;
constexpr int kDownCols = MOK_TILE_COLS;
// A weight gradient's tile: rows and columns of the weight.
constexpr int kWgradRows = 128;
constexpr int kWgradCols = MOK_TILE_COLS;
// The carry's unit, the same for every target: Python asks the host's build how much memory a GPU's kernels need. A tile
// of weight gradients is one of them or several side by side.
constexpr int kCarryRows = 128, kCarryCols = 128;
static_assert(kWgradRows == kCarryRows && kWgradCols % kCarryCols == 0);
// Columns that are reduced together, in a fixed tree: of a router gradient, and of an MX block.
constexpr int kLaneCols = 32;

// Run-time values on the host. A GPU build replaces this struct by one whose members are
// `static constexpr`, generated from the same names.
struct Shape {
  int32 num_ranks = 1;
  int32 max_tokens = 0;  // the largest T of any rank
  int32 topk = 1;
  int32 hidden_size = 0;
  int32 intermediate_size = 0;
  int32 shared_size = 0;  // 0: no shared expert
  int32 num_local_experts = 0;
  int32 row_block_rows = 128;  // see row_block()
  int32 minibatch = 4096;      // rows of a ring slot
  int32 capacity_rows = 0;     // rows that a schedule may hold, padding included
  int32 ring_rows = 0;         // rows of one generation
  bool is_push_dispatch = false;
  bool is_pull_once = false;  // a token comes to a rank once and is copied there; see dispatch.h
  bool is_pull_combine = false;
  bool is_minibatch_grain = false;  // signals of x_ready and y_ready: per minibatch slot
  bool is_serial_ring = false;
  bool has_backward = false;        // the workspace has regions and counters for a backward
  bool has_mxfp8_operands = false;  // see is_mxfp8()
  bool has_mxfp8_wire = false;      // see is_mxfp8_wire()

  // A constant of the target where it has only one: divisions by it are then shifts.
  MOK_DEVICE int32 row_block() const { return MOK_ROW_BLOCK ? MOK_ROW_BLOCK : row_block_rows; }
  // The routed experts' products have MXFP8 operands. A constant where a target compiles kernels for each type.
  MOK_DEVICE bool is_mxfp8() const { return MOK_MXFP8 && has_mxfp8_operands; }
  // Tokens are quantized at their source and travel as bytes and scales.
  MOK_DEVICE bool is_mxfp8_wire() const { return MOK_MXFP8 && has_mxfp8_wire; }
  // A token's row as peers read it: in MXFP8 its bytes, then its scales, and room to the next 16 bytes.
  MOK_DEVICE int64 token_row_bytes() const {
    if (!is_mxfp8_wire()) return hidden_size * int64{sizeof(bf16)};
    return ceil_div(hidden_size + hidden_size / kLaneCols, 16) * int64{16};
  }
  MOK_DEVICE int32 num_experts() const { return num_ranks * num_local_experts; }
  MOK_DEVICE int64 max_routes() const { return int64{max_tokens} * topk; }
  MOK_DEVICE int32 capacity_blocks() const { return capacity_rows / row_block(); }
  MOK_DEVICE int32 blocks_per_slot() const { return minibatch / row_block(); }
  MOK_DEVICE int32 slots_per_ring() const { return ceil_div(ring_rows, minibatch); }
  MOK_DEVICE int32 max_generations() const { return max_of(1, ring_rows ? ceil_div(capacity_rows, ring_rows) : 1); }
  // Two neighbouring windows hold more than a minibatch together, hence the bound.
  MOK_DEVICE int32 max_windows() const { return max_generations() * (2 * slots_per_ring() + 2); }
  MOK_DEVICE int32 token_blocks() const { return ceil_div(max_tokens, row_block()); }
  // At most every stage that is not windowed, and per generation every stage of a pass: a split plan's kernels.
  MOK_DEVICE int32 max_launches() const { return kNumStages - kNumWindowed + kMaxWindowedOfPass * max_generations(); }
  MOK_DEVICE int32 chunks_per_rank() const { return static_cast<int32>(ceil_div(max_routes(), int64{kScheduleChunk})); }
  MOK_DEVICE bool is_ring_complete() const { return ring_rows >= capacity_rows; }
};

// Rows for the worst case: every route of every rank comes here, and every expert has a last
// row block with one row in it.
MOK_DEVICE int64 worst_case_rows(int64 num_routes, int64 num_local_experts, int64 row_block) {
  const int64 padded = num_routes + min_of(num_local_experts, num_routes) * (row_block - 1);
  return padded / row_block * row_block;
}

// ---- workspace regions ----------------------------------------------------------------------

enum class Region : int32 {
  // symmetric: a peer reads or writes them
  x,            // bf16 [max_tokens, H]          the published input
  x_quantized,  // [max_tokens, row bytes]       the same in MXFP8, where tokens travel like that
  combine,      // bf16 [max_tokens * K, H]      one cell per route, one writer per cell; in a backward d_x of the route
  d_output,     // [max_tokens, row bytes]       published by a backward: bf16 [max_tokens, H], or in MXFP8
  router_weights,  // float [max_tokens * K]     likewise
  d_router,        // float [max_tokens * K]        one cell per route, pushed by a backward
  top_experts,     // int32 [2, R, max_tokens * K]  by parity of the schedule epoch, by source rank
  num_tokens,      // int32 [2, R]                  likewise
  words,           // Word                          signals across ranks: entered, ..., abort
  arrivals,        // Word [2, R, capacity_blocks]  push dispatch and pull combine only
  ring_x,  // bf16 [ring_rows, H]           symmetric for push dispatch; see quantize.h for what five regions hold last
  ring_y,  // bf16 [ring_rows, H]           symmetric for pull combine; in a backward d_x
  // local
  ring_gate,      // bf16 [ring_rows, I]
  ring_up,        // bf16 [ring_rows, I]
  ring_hidden,    // bf16 [ring_rows, I]           in a backward weight * h
  shared_hidden,  // bf16 [max_tokens, S]
  shared_y,       // bf16 [max_tokens, H]          in a backward the shared expert's d_x
  // of a backward
  ring_d_y,         // bf16 [ring_rows, H]
  ring_weight,      // float [ring_rows]           router weight of a row
  ring_d_hidden,    // bf16 [ring_rows, I]
  ring_d_gate,      // bf16 [ring_rows, I]
  ring_d_up,        // bf16 [ring_rows, I]
  router_partials,  // float [ring_rows, I / 32]   a row's d_router by groups of columns
  shared_d_gate,    // bf16 [max_tokens, S]
  shared_d_up,      // bf16 [max_tokens, S]
  carry,            // float [units, 128, 128]     weight gradients of the expert that goes on in the next macrobatch
  counters,         // Word [2 banks, ...]           signals inside a rank, tickets
  epochs,           // Epochs
  histogram,        // int32 [R * (chunks + 1), E]   schedule only: prefixes by chunk, then totals
  kCount,
};
constexpr int kNumRegions = static_cast<int>(Region::kCount);

constexpr const char* region_name(Region region) {
  constexpr const char* kNames[kNumRegions] = {
      "x",           "x_quantized",   "combine",     "d_output",      "router_weights",  "d_router",
      "top_experts", "num_tokens",    "words",       "arrivals",      "ring_x",          "ring_y",
      "ring_gate",   "ring_up",       "ring_hidden", "shared_hidden", "shared_y",        "ring_d_y",
      "ring_weight", "ring_d_hidden", "ring_d_gate", "ring_d_up",     "router_partials", "shared_d_gate",
      "shared_d_up", "carry",         "counters",    "epochs",        "histogram"};
  return kNames[static_cast<int>(region)];
}

// Device memory, not kernel arguments: an argument would be frozen by graph capture.
struct Epochs {
  Word call;        // finished calls
  Word schedule;    // finished schedules
  Word order;       // finished calls and schedules together
  Word generation;  // resets
};

// ---- signals --------------------------------------------------------------------------------

// Tiles of an expert's three weight gradients.
MOK_DEVICE int32 num_wgrad_tiles(int32 hidden_size, int32 width) {
  return 2 * ceil_div(width, kWgradRows) * ceil_div(hidden_size, kWgradCols) +
         ceil_div(hidden_size, kWgradRows) * ceil_div(width, kWgradCols);
}
// Units of the carry of one expert; only one whose rows go on in the next macrobatch leaves a carry.
MOK_DEVICE int32 num_carry_units(int32 hidden_size, int32 width) {
  return 2 * ceil_div(width, kCarryRows) * ceil_div(hidden_size, kCarryCols) +
         ceil_div(hidden_size, kCarryRows) * ceil_div(width, kCarryCols);
}
MOK_DEVICE int32 num_carry_units(const Shape& s) {
  return s.has_backward && !s.is_ring_complete() ? num_carry_units(s.hidden_size, s.intermediate_size) : 0;
}

// The counters of Edge::tickets that every launch has: one for each order that its workers draw from.
enum class Tickets : int32 {
  tasks,          // tasks of any role, or of compute workers
  communication,  // tasks of communication workers
  publish,        // GPU: publish, where it precedes the other communication of a kernel
  pull_combine,   // GPU: a pulled combine, where it follows the other communication of a kernel
  roles,          // GPU: CTAs by arrival, to tell which of them only communicate
  kCount,
};
MOK_DEVICE int64 ticket_index(int32 launch_idx, Tickets tickets) {
  return int64{launch_idx} * static_cast<int32>(Tickets::kCount) + static_cast<int32>(tickets);
}

// How many counters an edge has in one bank (for edges inside a rank).
inline int64 num_counters(const EdgeRow& row, const Shape& s) {
  if (row.scope != Scope::rank || (row.pass == Pass::backward && !s.has_backward)) return 0;
  switch (row.cells) {
    case Cells::one:
      return 1;
    case Cells::two:
      return 2;
    case Cells::row_blocks:
    case Cells::row_blocks_or_slots:
      return s.capacity_blocks();
    case Cells::slots:
      return int64{s.max_generations()} * s.slots_per_ring();
    case Cells::token_blocks:
      return s.token_blocks();
    case Cells::segments:
      return int64{s.max_generations()} * s.num_local_experts;
    case Cells::carries:
      return int64{s.max_generations()} * num_carry_units(s);
    case Cells::owner_blocks:
      return s.is_push_dispatch ? int64{s.num_ranks} * s.capacity_blocks() : 0;
    case Cells::launches:
      return s.max_launches();
    case Cells::launch_tickets:
      return ticket_index(s.max_launches(), Tickets::tasks);
    default:
      return 0;
  }
}
// Calls and schedules clear their banks apart, so their counters stand apart: [call, call', schedule, schedule'].
inline int64 bank_size(bool is_schedule, const Shape& s) {
  int64 total = 0;
  for (int edge = 0; edge < kNumEdges; ++edge)
    if (is_schedule_edge(static_cast<Edge>(edge)) == is_schedule) total += num_counters(kEdges[edge], s);
  return total;
}
inline int64 bank_start(bool is_schedule, int parity, const Shape& s) {
  return (is_schedule ? 2 * bank_size(false, s) : 0) + parity * bank_size(is_schedule, s);
}
inline int64 counter_offset(Edge edge, int parity, const Shape& s) {
  int64 offset = bank_start(is_schedule_edge(edge), parity, s);
  for (int before = 0; before < static_cast<int>(edge); ++before)
    if (is_schedule_edge(static_cast<Edge>(before)) == is_schedule_edge(edge))
      offset += num_counters(kEdges[before], s);
  return offset;
}

// Cross-rank words in Region::words: of each edge one or two (by parity) from every rank, then abort[R].
MOK_DEVICE int64 word_offset(Edge edge, int parity, int src_rank, const Shape& s) {
  switch (edge) {
#define MOK_WORD_CASE(name, scope, epoch, cells, ...) \
  case Edge::name:                                    \
    return int64{words_before(Edge::name) + (Cells::cells == Cells::two_words ? parity : 0)} * s.num_ranks + src_rank;
    MOK_EDGES(MOK_WORD_CASE)
#undef MOK_WORD_CASE
    default:
      return 0;
  }
}
MOK_DEVICE int64 abort_offset(int src_rank, const Shape& s) { return int64{kNumWords} * s.num_ranks + src_rank; }

MOK_DEVICE int64 region_bytes(Region region, const Shape& s) {
  const int64 bf16_bytes = sizeof(bf16), float_bytes = sizeof(float), word_bytes = sizeof(Word), ranks = s.num_ranks;
  switch (region) {
    case Region::x:
      return s.max_tokens * bf16_bytes * s.hidden_size;
    case Region::x_quantized:
      return s.is_mxfp8_wire() ? s.max_tokens * s.token_row_bytes() : 0;
    case Region::combine:
      return s.max_routes() * bf16_bytes * s.hidden_size;
    case Region::d_output:
      return s.has_backward ? s.max_tokens * s.token_row_bytes() : 0;
    case Region::router_weights:
    case Region::d_router:
      return s.has_backward ? s.max_routes() * float_bytes : 0;
    case Region::top_experts:
      return 2 * ranks * s.max_routes() * int64{sizeof(int32)};
    case Region::num_tokens:
      return 2 * ranks * int64{sizeof(int32)};
    case Region::words:
      return (kNumWords + 1) * ranks * word_bytes;
    case Region::arrivals:
      return (s.is_push_dispatch || s.is_pull_combine) ? 2 * ranks * s.capacity_blocks() * word_bytes : 0;
    case Region::ring_x:
    case Region::ring_y:
      return s.ring_rows * bf16_bytes * s.hidden_size;
    case Region::ring_gate:
    case Region::ring_up:
    case Region::ring_hidden:
      return s.ring_rows * bf16_bytes * s.intermediate_size;
    case Region::shared_hidden:
      return s.max_tokens * bf16_bytes * s.shared_size;
    case Region::shared_y:
      return s.shared_size ? s.max_tokens * bf16_bytes * s.hidden_size : 0;
    case Region::ring_d_y:
      return s.has_backward ? s.ring_rows * bf16_bytes * s.hidden_size : 0;
    case Region::ring_weight:
      return s.has_backward ? s.ring_rows * float_bytes : 0;
    case Region::ring_d_hidden:
    case Region::ring_d_gate:
    case Region::ring_d_up:
      return s.has_backward ? s.ring_rows * bf16_bytes * s.intermediate_size : 0;
    case Region::router_partials:
      return s.has_backward ? s.ring_rows * float_bytes * (s.intermediate_size / kLaneCols) : 0;
    case Region::shared_d_gate:
    case Region::shared_d_up:
      return s.has_backward ? s.max_tokens * bf16_bytes * s.shared_size : 0;
    case Region::carry:
      return num_carry_units(s) * float_bytes * kCarryRows * kCarryCols;
    case Region::counters:
      return 2 * (bank_size(false, s) + bank_size(true, s)) * word_bytes;
    case Region::epochs:
      return sizeof(Epochs);
    case Region::histogram:
      return ranks * (s.chunks_per_rank() + 1) * int64{sizeof(int32)} * s.num_experts();
    default:
      return 0;
  }
}
MOK_DEVICE bool is_symmetric(Region region, const Shape& s) {
  return region <= Region::arrivals || (region == Region::ring_x && s.is_push_dispatch) ||
         (region == Region::ring_y && s.is_pull_combine);
}

// ---- what a call works on -------------------------------------------------------------------

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
