// The explorer's target: needs and publishes of the stages are compiled, by a worker that records them (recorder.h); tiles
// are not. Its numbers make as few tasks as can still differ: of a row block one copy task, one element task, three column
// tiles of gate_up, two of the other products, and one weight-gradient tile of each weight of an expert.
#pragma once

// The same names with other numbers live in the same library: the host target's.
#define mok mok_model

#define MOK_DEVICE inline
#define MOK_ROW_BLOCK 32
#define MOK_COPY_ROWS 32
#define MOK_TILE_COLS 32
#define MOK_WGRAD_COLS 128
#define MOK_GROUP_BYTES (30 << 20)
#define MOK_REDUCE_BATCH 10
#define MOK_UNROLL
#define MOK_MXFP8 1
#include "targets/host/math.h"
#include "targets/host/memory.h"
