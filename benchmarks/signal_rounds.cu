// Two writers hand a row to and fro, one CTA each; half of the rounds belong to each. What a hand-over holds, by mode:
//   0 word   fence, word at the other GPU; the other sees it
//   1 pull   row into own memory, fence, word at the other GPU; the other sees it and reads the row over the link
//   2 push   row into the other GPU's memory, fence, word there; the other sees it and reads the row from own memory
//   3 local  as 2 between two CTAs of one GPU, with a fence and a word of GPU scope
// The reader checks every element. Nobody waits longer than two seconds: *abort ends the others' waits then.
namespace {

using uint64 = unsigned long long;
constexpr int kThreads = 256;

__device__ uint64 now_ns() {
  uint64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ uint4 load(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ void set(uint64* word, uint64 value, bool is_local) {
  if (is_local) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  } else {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
}

__device__ bool wait(const uint64* word, uint64 value, bool is_local, const uint64* result) {
  const uint64 start = now_ns();
  for (int i = 1;; ++i) {
    uint64 seen;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
    if (seen >= value) break;
    if (i % 1024 == 0 && (now_ns() - start > 2000000000ull || *(volatile const uint64*)(result + 1))) return false;
  }
  if (is_local)
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  else
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  return true;
}

}  // namespace

// words[w], rows[w]: where writer w waits, and where a row for it is written (pull: where its own row is). result: wrong
// elements, and whether a wait expired.
extern "C" __global__ void __launch_bounds__(kThreads)
    signal_rounds(int mode, int first_writer, int num_rounds, int num_vectors, uint64* word0, uint64* word1, uint4* row0,
                  uint4* row1, uint4* sink, uint64* result) {
  const int writer = mode == 3 ? blockIdx.x : first_writer;
  uint64* const words[2] = {word0, word1};
  uint4* const rows[2] = {row0, row1};
  __shared__ int is_over;
  if (threadIdx.x == 0) is_over = 0;
  __syncthreads();
  unsigned wrong = 0;
  for (int round = 1; round <= num_rounds; ++round) {
    const bool is_writing = round % 2 == writer;
    const unsigned value = static_cast<unsigned>(round);
    if (is_writing) {
      if (mode != 0) {
        uint4* const row = mode == 1 ? rows[writer] : rows[1 - writer];
        for (int i = threadIdx.x; i < num_vectors; i += kThreads) row[i] = make_uint4(value, value, value, i);
      }
      __syncthreads();
      if (threadIdx.x == 0) set(words[1 - writer], round, mode == 3);
    } else {
      if (threadIdx.x == 0 && !wait(words[writer], round, mode == 3, result)) is_over = 1;
      __syncthreads();
      if (is_over) break;
      if (mode != 0) {
        const uint4* const row = mode == 1 ? rows[1 - writer] : rows[writer];
        for (int base = threadIdx.x; base < num_vectors; base += 4 * kThreads) {
          uint4 v[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (base + j * kThreads < num_vectors) v[j] = load(row + base + j * kThreads);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = base + j * kThreads;
            if (i >= num_vectors) continue;
            wrong += v[j].x != value || v[j].y != value || v[j].z != value || v[j].w != unsigned(i);
            if (mode == 1) sink[i] = v[j];
          }
        }
        __syncthreads();
      }
    }
  }
  if (wrong) atomicAdd(result, wrong);
  if (is_over && threadIdx.x == 0) atomicExch(result + 1, 1ull);
}
