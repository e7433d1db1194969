// How a warp copies rows by the copy engine: through a ring of chunks in shared memory, kChunks - 1 loads under way.
#pragma once

#include "targets/cuda/async.h"

namespace mok::cuda {

template <int kChunks, int kChunkBytes>
class ChunkPipe {
 public:
  // Copies the rows whose bits are set in `rows`, `size` bytes each, one after another: lane i holds the addresses of row
  // i. Lane 0 issues all copies; its warp goes along. `chunks` and `full` are the ring and its mbarriers in shared memory;
  // a policy says how long the lines that are read or written stay in the L2. All rows are written when this returns.
  template <class LoadPolicy, class StorePolicy>
  MOK_DEVICE void copy(uint32 chunks, uint32 full, uint32 rows, int32 size, uint64 to, uint64 from,
                       LoadPolicy&& load_policy, StorePolicy&& store_policy) {
    const bool is_first = lane_idx() == 0;
    if (rows == 0) return;
    if (is_first) fence_proxy_async();  // what others wrote, acquired by the leader, before copies of this proxy
    uint32 load_rows = rows;
    int32 load_offset = 0, store_offset = 0, in_flight = 0;
    while (rows != 0) {
      while (load_rows != 0 && in_flight < kChunks - 1) {
        const uint64 at = __shfl_sync(0xffffffffu, from, first_row(load_rows)) + load_offset;
        const uint32 num = static_cast<uint32>(min_of(kChunkBytes, size - load_offset));
        if (is_first) {
          mbarrier_expect_bytes(full + loaded_.slot * 8, num);
          bulk_load(chunks + loaded_.slot * kChunkBytes, reinterpret_cast<const void*>(at), num,
                    full + loaded_.slot * 8, load_policy());
        }
        loaded_.advance();
        ++in_flight;
        if ((load_offset += kChunkBytes) >= size) load_offset = 0, load_rows &= load_rows - 1;
      }
      const uint64 at = __shfl_sync(0xffffffffu, to, first_row(rows)) + store_offset;
      const uint32 num = static_cast<uint32>(min_of(kChunkBytes, size - store_offset));
      mbarrier_wait(full + stored_.slot * 8, stored_.phase);
      if (is_first) {
        bulk_store(reinterpret_cast<void*>(at), chunks + stored_.slot * kChunkBytes, num, store_policy());
        bulk_commit();
        bulk_wait_read<1>();  // the chunk before this one may be loaded again
      }
      stored_.advance();
      --in_flight;
      if ((store_offset += kChunkBytes) >= size) store_offset = 0, rows &= rows - 1;
    }
    if (is_first) bulk_wait_written();
    __syncwarp();
  }

  MOK_DEVICE static int32 first_row(uint32 rows) { return __ffs(static_cast<int>(rows)) - 1; }

 private:
  Position<kChunks> loaded_, stored_;
};

}  // namespace mok::cuda
