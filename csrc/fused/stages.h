// The stages that can share a kernel.
#pragma once

#include "stages/combine.h"
#include "stages/dispatch.h"
#include "stages/grouped_dgrad.h"
#include "stages/grouped_gemm.h"
#include "stages/publish.h"
#include "stages/quantize.h"
#include "stages/reverse_combine.h"
#include "stages/reverse_dispatch.h"
#include "stages/swiglu.h"
#include "stages/swiglu_backward.h"
#include "stages/wgrad.h"
