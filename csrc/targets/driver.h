// The driver of the target that is compiled: run_tasks, run_single, MOK_KERNEL, Worker.
#pragma once

#if defined(MOK_TARGET_HOST)
#include "targets/host/driver.h"
#elif defined(MOK_TARGET_CUDA)
#include "targets/cuda/driver.h"
#endif
