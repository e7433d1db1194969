// What every GPU generation has in common, and the generation that is compiled: MOK_ARCH_SM90 is Hopper.
#pragma once

#define MOK_DEVICE __device__ __forceinline__
#define MOK_UNROLL _Pragma("unroll")
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif

#if defined(MOK_ARCH_SM90)
#include "targets/sm90/target.h"
#else
#error "define the GPU generation: MOK_ARCH_SM90"
#endif

#include "targets/cuda/math.h"
#include "targets/cuda/memory.h"
