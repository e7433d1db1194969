// The one place that knows which compiler reads the stage code.
//
// Stage code, the protocol and the shells are compiled once per target:
//   MOK_TARGET_HOST   a C++20 compiler; workers are fibers or threads (targets/host/)
//   MOK_TARGET_SM90   NVRTC for sm_90a; workers are CTAs (targets/cuda/), GEMM role loops in targets/sm90/; with MOK_MXFP8=1
//                     the kernels of MXFP8 layers
//   MOK_TARGET_MODEL  a C++20 compiler; needs and publishes alone, recorded for the explorer (explore/)
// Every target provides the same names: MOK_DEVICE, MOK_KERNEL, the word operations of
// memory.h, exp_f32 / rcp_f32 of math.h, and a Worker (see targets/README.md).
#pragma once

#if defined(MOK_TARGET_HOST)
#define MOK_DEVICE inline
#define MOK_ROW_BLOCK 0  // 128 or 256, by the shape
#define MOK_TILE_COLS 128
#define MOK_UNROLL
#define MOK_MXFP8 1  // by the shape
#include "targets/host/math.h"
#include "targets/host/memory.h"
#elif defined(MOK_TARGET_SM90)
#define MOK_DEVICE __device__ __forceinline__
#define MOK_ROW_BLOCK 128
#define MOK_TILE_COLS 256
#define MOK_UNROLL _Pragma("unroll")
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif
#include "targets/cuda/math.h"
#include "targets/cuda/memory.h"
#elif defined(MOK_TARGET_MODEL)
#include "explore/target.h"
#else
#error "define one of: MOK_TARGET_HOST, MOK_TARGET_SM90, MOK_TARGET_MODEL"
#endif
