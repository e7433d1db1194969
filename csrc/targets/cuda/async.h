// PTX that the CUDA targets share: mbarriers, and bulk copies between global and shared memory (sm_90 and up).
#pragma once

#include "numeric.h"

namespace mok {

MOK_DEVICE uint32 lane_idx() {
  uint32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
MOK_DEVICE uint32 smem_address(const void* pointer) { return static_cast<uint32>(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers ----

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
// the scheduler alone, with a limit. (A trap in this loop would cost the roles their register budgets: ptxas C7512.)
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

// A position in a ring of mbarriers.
template <int kSlots>
struct Position {
  uint32 slot = 0, phase = 0;
  MOK_DEVICE void advance() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
  }
};

// ---- bulk copies: 16-byte aligned, sizes multiples of 16 ----

// How long their lines stay in the L2: a policy of the lines that they touch.
MOK_DEVICE uint64 evict_first() {
  uint64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MOK_DEVICE uint64 evict_normal() {
  uint64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MOK_DEVICE uint64 evict_last() {
  uint64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MOK_DEVICE void bulk_load(uint32 dst, const void* src, uint32 num_bytes, uint32 barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(num_bytes), "r"(barrier), "l"(policy)
      : "memory");
}
MOK_DEVICE void bulk_store(void* dst, uint32 src, uint32 num_bytes, uint64 policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(dst), "r"(src),
               "r"(num_bytes), "l"(policy)
               : "memory");
}
// Closes a group of this thread's stores; the waits are for its groups.
MOK_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most kPending groups still read their shared memory: it may be overwritten, but nobody may be told.
template <int kPending>
MOK_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// All are written, as if this thread had stored them.
MOK_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace mok
