// The driver of GEMM stages of the target that is compiled: MOK_GEMM_KERNEL(name, stage),
// MOK_PERSISTENT_KERNELS(stages by group).
#pragma once

#if defined(MOK_TARGET_HOST)
#include "targets/host/gemm_driver.h"
#elif defined(MOK_TARGET_CUDA)
#if defined(MOK_ARCH_SM90)
#include "targets/sm90/consumer.h"
#endif
#include "targets/cuda/gemm/roles.h"
#endif
