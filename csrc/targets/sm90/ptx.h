// PTX of sm_90a that the role loops use: mbarriers, TMA loads, registers, stmatrix.
#pragma once

#include "numeric.h"

namespace mok::sm90 {

// A CUtensorMap, opaque here; part of a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

MOK_DEVICE uint32 lane_idx() {
  uint32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
MOK_DEVICE uint32 smem_address(const void* pointer) { return static_cast<uint32>(__cvta_generic_to_shared(pointer)); }

// ---- registers and barriers ----

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

MOK_DEVICE void mbarrier_init(uint32 barrier, uint32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
MOK_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MOK_DEVICE void mbarrier_expect_bytes(uint32 barrier, uint32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}
MOK_DEVICE void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Unbounded on purpose: who arrives here is a warp of the same CTA or its TMA. What may never come is waited for by
// the producer alone, with a limit. (A trap in this loop would cost the roles their register budgets: ptxas C7512.)
MOK_DEVICE void mbarrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True if the phase is over; may be false early.
MOK_DEVICE bool mbarrier_test(uint32 barrier, uint32 parity) {
  uint32 is_over;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over != 0;
}

// ---- TMA ----

MOK_DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
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

}  // namespace mok::sm90
