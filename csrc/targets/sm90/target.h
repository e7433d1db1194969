// Hopper (sm_90a): the numbers that stage code and the protocol ask of a target (targets/README.md).
#pragma once

#define MOK_ROW_BLOCK 128
#define MOK_TILE_COLS 256
#define MOK_GEMM_ATTRIBUTES  // of a GEMM kernel, such as the size of its clusters

// Measured on an H200 (50 MB of L2).
#if !defined(MOK_GROUP_BYTES)
#define MOK_GROUP_BYTES (30 << 20)
#endif
// T = 2048 and 8192: for K = 10 ten rows are 10 and 13% faster than eight, for K = 8 4 and 7% slower (of a forward 0.8%
// and 0.2%). One kernel with both spills.
#define MOK_REDUCE_BATCH 10
