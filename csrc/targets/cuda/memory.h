// Word operations of the CUDA targets, in terms of the PTX memory model.
//
// Polls are relaxed and one fence follows success: an acquire in the loop would empty the L1 at every poll.
// Signals across ranks have two bodies. `direct`: a plain 64-bit store to the peer's address, the same store that a
// signal operation of NVSHMEM performs over NVLink. `nvshmem` (MOK_SIGNALS_NVSHMEM): that operation itself, in kernels
// without matrix products only; linked into a kernel with wgmma it would serialise the products.
#pragma once

namespace mok {

using Word = unsigned long long;

__device__ __forceinline__ Word load_relaxed(const Word* word) {
  Word value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
// Acquire for every relaxed load that this thread made before.
__device__ __forceinline__ void fence_acquire(const Word*, bool is_cross_rank) {
  if (is_cross_rank)
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  else
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
// Inside a rank. Returns the value before the addition.
__device__ __forceinline__ Word add_release(Word* word, Word value) {
  Word before;
  asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void store_system(Word* word, Word value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Sets a word of another rank. `at_dst`: its address there as this rank sees it; `own`: the same word of this rank's
// memory. Orders nothing: a fence comes before it.
#if defined(MOK_SIGNALS_NVSHMEM)
extern "C" __device__ void mok_nvshmem_set(Word* own, Word value, int dst_rank);  // nvshmem_signal.cu
__device__ __forceinline__ void store_signal(Word*, Word* own, int dst_rank, Word value) {
  mok_nvshmem_set(own, value, dst_rank);
}
#else
__device__ __forceinline__ void store_signal(Word* at_dst, Word*, int, Word value) { store_system(at_dst, value); }
#endif

// Generic accesses before, asynchronous-proxy (TMA) accesses after, or the other way round.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ Word global_timer_ns() {
  Word now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace mok
