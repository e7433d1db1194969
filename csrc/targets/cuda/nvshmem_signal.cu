// The `nvshmem` body of signals across ranks: a compilation unit of its own, linked to the kernels that use it.
//
// Only here are NVSHMEM's headers read (seconds of compilation). The unit and the kernels are relocatable; the device
// library itself is linked in last.
#include <cuda/std/type_traits>

// The headers of NVSHMEM up to 3.4 take these from the host's standard library, which run-time compilation lacks.
namespace std {
using cuda::std::conditional;
using cuda::std::enable_if;
using cuda::std::is_integral;
using cuda::std::is_same;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std

#include <nvshmem.h>

extern "C" __device__ void mok_nvshmem_set(unsigned long long* own, unsigned long long value, int dst_rank) {
  nvshmemx_signal_op(reinterpret_cast<uint64_t*>(own), value, NVSHMEM_SIGNAL_SET, dst_rank);
}
