// The plain copy that stages are compared with: 16 bytes a thread, eight loads in flight. Either side may be a peer's.
extern "C" __global__ void __launch_bounds__(512) peer_copy(uint4* dst, const uint4* src, long long count) {
  const long long stride = static_cast<long long>(gridDim.x) * 512;
  for (long long first = blockIdx.x * 512ll + threadIdx.x; first < count; first += 8 * stride) {
    uint4 words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i * stride < count) words[i] = src[first + i * stride];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i * stride < count) dst[first + i * stride] = words[i];
  }
}
