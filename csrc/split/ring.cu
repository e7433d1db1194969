// ring has no worker of its own: it is arithmetic and words (protocol/ring.h). This kernel writes the
// arithmetic out, one line a row block, so that it can be tested and looked at alone.
#include "protocol/ring.h"

#include "targets/driver.h"

namespace mok::kernels {

// table: [num_blocks, 5] = macrobatch, first row in the ring, slot, macrobatch that must have freed the slot (-1: none),
// row blocks that the macrobatch has in the slot.
void ring_block(const Call& call, int32 block, int32* table) {
  const Shape& s = call.shape;
  const int32 macrobatch = block_macrobatch(s, block), slot = block_slot(s, block);
  table[5 * block + 0] = macrobatch;
  table[5 * block + 1] = static_cast<int32>(block_ring_row(s, block));
  table[5 * block + 2] = slot;
  table[5 * block + 3] = slot_predecessor(call, macrobatch, slot);
  table[5 * block + 4] = slot_num_blocks(call, macrobatch, slot);
}

}  // namespace mok::kernels
