// Sizes, regions and counters, once for host, device and Python. Python asks this file for sizes and names; it never does
// address arithmetic of its own.
#pragma once

#include "numeric.h"
#include "protocol/roster.h"

namespace mok {

constexpr int kMaxRanks = 128;

// ---- sizes ----------------------------------------------------------------------------------

// The explorer's target (explore/target.h) has another size, so that one task copies a row block.
#if !defined(MOK_COPY_ROWS)
#define MOK_COPY_ROWS 16
#define MOK_WGRAD_COLS MOK_TILE_COLS
#endif

// Rows per task of the copy stages and of standalone swiglu; tokens per task of reduce. Fixed here because writers and
// readers of a signal must agree on them.
constexpr int kCopyRows = MOK_COPY_ROWS;
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
constexpr int kWgradCols = MOK_WGRAD_COLS;
// The carry's unit, the same for every target: Python asks the host's build how much memory a GPU's kernels need. A tile
// of weight gradients is one of them or several side by side.
constexpr int kCarryRows = 128, kCarryCols = 128;
static_assert(kWgradRows == kCarryRows && kWgradCols % kCarryCols == 0);
// Columns that are reduced together, in a fixed tree: of a router gradient, and of an MX block.
constexpr int kLaneCols = 32;

// What sizes follow from: run-time values on every target, so that one compiled kernel serves all shapes.
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

}  // namespace mok
