// Arithmetic of the CUDA targets. Compiled with -fmad=false: a*b+c is two roundings, fmaf_f32 is one.
#pragma once

namespace mok {

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned float_to_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ unsigned short float_to_bf16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The one exponential and the one reciprocal of the CUDA targets: the hardware's, errors of 2 and 1 ulp.
__device__ __forceinline__ float exp_f32(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value * 1.4426950408889634f));
  return result;
}
__device__ __forceinline__ float rcp_f32(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
__device__ __forceinline__ float fmaf_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }

}  // namespace mok
