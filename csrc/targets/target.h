// The one place that knows which compiler reads the stage code.
//
// Stage code, the protocol and the shells are compiled once per target:
//   MOK_TARGET_HOST   a C++20 compiler; workers are fibers or threads (targets/host/)
//   MOK_TARGET_CUDA   NVRTC; workers are CTAs (targets/cuda/), GEMM kernels have role loops (targets/cuda/gemm/). A second
//                     macro names the GPU generation: MOK_ARCH_SM90 is Hopper (targets/sm90/). With MOK_MXFP8=1 the kernels
//                     are those of MXFP8 layers
//   MOK_TARGET_MODEL  a C++20 compiler; needs and publishes alone, recorded for the explorer (explore/)
// Every target provides the same names: MOK_DEVICE, MOK_KERNEL, the word operations of
// memory.h, exp_f32 / rcp_f32 of math.h, and a Worker (see targets/README.md).
#pragma once

#if defined(MOK_TARGET_HOST)
#include "targets/host/target.h"
#elif defined(MOK_TARGET_CUDA)
#include "targets/cuda/target.h"
#elif defined(MOK_TARGET_MODEL)
#include "explore/target.h"
#else
#error "define one of: MOK_TARGET_HOST, MOK_TARGET_CUDA, MOK_TARGET_MODEL"
#endif
