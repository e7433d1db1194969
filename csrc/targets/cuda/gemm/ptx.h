// PTX that GEMM kernels of every generation use (sm_90 and up): TMA loads, registers, stmatrix.
#pragma once

#include "targets/cuda/async.h"

namespace mok::cuda::gemm {

// A CUtensorMap, opaque here; part of a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// ---- registers and named barriers ----

template <int kRegisters>
MOK_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MOK_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
MOK_DEVICE void named_sync(uint32 id, uint32 num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
MOK_DEVICE void named_arrive(uint32 id, uint32 num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- TMA ----

MOK_DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// What wrote a map in global memory, before copies that use it.
MOK_DEVICE void fence_tensor_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// Rows past the end of the tensor arrive as zeros.
MOK_DEVICE void tma_load_2d(uint32 dst, const TensorMap* map, uint32 barrier, int32 x, int32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(dst),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
MOK_DEVICE void tma_load_3d(uint32 dst, const TensorMap* map, uint32 barrier, int32 x, int32 y, int32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// ---- shared memory ----

// Lane l gives the address of row l % 8 of 8x8 matrix l / 8; its word i is that of matrix i.
MOK_DEVICE void stmatrix_x4(uint32 address, const uint32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace mok::cuda::gemm
