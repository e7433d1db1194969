// The host: the numbers that stage code and the protocol ask of a target (targets/README.md).
#pragma once

#define MOK_DEVICE inline
#define MOK_ROW_BLOCK 0  // 128 or 256, by the shape
#define MOK_TILE_COLS 128
#define MOK_GROUP_BYTES (30 << 20)  // as Hopper, so that both have one order of tasks
#define MOK_REDUCE_BATCH 10
#define MOK_UNROLL
#define MOK_MXFP8 1  // by the shape
#include "targets/host/math.h"
#include "targets/host/memory.h"
