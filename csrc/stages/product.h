// The contract of matrix products, and what all of them use.
//
// Products are gate_up, down, their dgrads, wgrad, and the same of the shared expert (grouped_gemm.h, grouped_dgrad.h, wgrad.h). Each is a
// pure function of its task; the loops that load, multiply and overlap are the target's, one for all of them. They differ
// in what follows and in nothing else:
//   kNumAccumulators              1, or 2 side by side that share A
//   kNumProducts                  products into the same accumulators, one after another
//   kMajorA, kMajorB              how the operands lie in memory
//   kIsBackward                   it reads matrices of a backward
//   Epilogue                      the product whose code of `element` serves this one too
//   kTileCols, tile_rows(call)    the tile of one accumulator
//   decode(call, task)            which rows, columns and k range
//   needs(args, task, signals)
//   operands(call, task, tile, product)  where A[rows, k] and B[cols, k] start
//   planes(call, task)            what the tile leaves
// Sums run over k ascending, whatever the number of rows. For each plane, where kHasSums is false:
//   plane_accumulator(plane)      the accumulator that the plane is, rounded to BF16; negative: `element` makes it
//   kElementReadsRows             `element` reads and writes more of the row than its accumulators
//   element(...)                  rounded accumulators -> BF16, for 32 columns of a row held by the calling lanes (lanes.h)
//   plane_rows(call, task, plane) where the block's rows of a plane start; null where each row is pushed to its source
//   row_address(...)              where one row goes: there, or to its source
//   store(...)                    a part of the BF16 tile of a plane -> there, or to the rows' sources
// and where it is true:
//   start(call, task)             FP32 sums of the tile to start from, rows start_pitch(tile) apart; null: from zero
//   store_sums(...)               FP32 sums -> where they go, for 32 columns of a row held by the calling lanes
// Then
//   publishes(args, task, signals)
//   element_stage, store_stage    for tables: the stage that `element` and `store` are the work of, if it lives in this one
// Gate and up of the same element meet in one call of `element` (two accumulators), so swiglu is pointwise there.
#pragma once

#include "stages/lanes.h"
#include "stages/matrices.h"

namespace mok {

struct GemmTile {
  int32 expert;     // local expert; 0 for the shared expert
  int32 num_rows;   // valid rows; the other rows of the block are padding
  int32 first_col;  // output columns [first_col, first_col + num_cols)
  int32 num_cols;
  int32 num_k;  // of all products together
};

// What a tile may leave: of a forward, of a dgrad, of wgrad.
enum class Plane : int32 { gate, up, hidden, y, d_hidden, d_gate, d_up, weighted_hidden, d_x, weight, carry };

// A few planes in one word: an array would have to live in memory on a GPU.
struct PlaneList {
  uint32 word = 0;
  MOK_DEVICE PlaneList with(Plane plane) const { return PlaneList{word << 4 | (static_cast<uint32>(plane) + 1)}; }
  MOK_DEVICE bool is_empty() const { return word == 0; }
  MOK_DEVICE bool has(Plane plane) const {
    bool is_there = false;
    for (uint32 rest = word; rest != 0; rest >>= 4) is_there |= (rest & 15u) == static_cast<uint32>(plane) + 1;
    return is_there;
  }
  MOK_DEVICE Plane pop() {
    const Plane plane = static_cast<Plane>((word & 15u) - 1);
    word >>= 4;
    return plane;
  }
};

// Values of a plane, relative to the task's tile: all of it, or what one warp holds of it.
struct TilePart {
  int32 first_row, num_rows;
  int32 first_col, num_cols;  // what lies behind the last column is left out
  const bf16* values;         // [num_rows, pitch]
  int64 pitch;
};

// Where row `row` of a task's block goes: `rows` is where the block starts in a matrix of `width` columns; null: each row
// goes to its source. Null: nowhere. Padding rows are kept (as zeros) where somebody reads them: not behind the
// last token, and not in what is pushed.
MOK_DEVICE bf16* tile_row(const Call& call, const Task& task, bf16* rows, int64 width, int32 row, bool has_padding) {
  if (row >= task.num_rows && !has_padding) return nullptr;
  return rows ? rows + row * width : combine_destination(call, int64{task.block} * call.shape.row_block() + row);
}

// Stores a part of a plane's tile there.
template <class Worker>
MOK_DEVICE void store_tile_part(const Call& call, Worker& worker, const Task& task, bf16* rows, const TilePart& part,
                                int64 width, int32 first_col, bool has_padding) {
  const int32 num_cols = min_of(part.num_cols, static_cast<int32>(width) - first_col);
  worker.copy_rows(
      part.num_rows, num_cols * int64{sizeof(bf16)},
      [&](int32 i) -> bf16* {
        bf16* row = tile_row(call, task, rows, width, part.first_row + i, has_padding);
        return row ? row + first_col : nullptr;
      },
      [&](int32 i) { return part.first_row + i < task.num_rows ? part.values + i * part.pitch : nullptr; });
}

}  // namespace mok
