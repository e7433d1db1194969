// Rows of tokens, x or d_output, on their way from their source to the rows that use them.
//
// BF16 layers copy them. In MXFP8 a row is quantized along its columns, once: at its source, which then publishes bytes and
// scales, or by whoever pulled it in BF16. The ring holds the same values either way.
#pragma once

#include "mxfp8.h"
#include "stages/stage.h"

namespace mok {

// Eight elements of a block, a byte each, and its scale.
MOK_DEVICE bf16x8 from_e4m3x8(uint64 codes, uint32 scale) {
  Lanes8 lanes;
  MOK_UNROLL
  for (int32 i = 0; i < 8; ++i) lanes.bits[i] = static_cast<uint32>(codes >> 8 * i) & 0xffu;
  MOK_UNROLL
  for (int32 i = 0; i < 8; ++i) lanes.bits[i] = from_e4m3(lanes.bits[i], scale).bits;
  return pack(lanes);
}
MOK_DEVICE uint64 to_e4m3x8(const Lanes8& lanes, uint32 scale) {
  uint32 codes[8];
  MOK_UNROLL
  for (int32 i = 0; i < 8; ++i) codes[i] = to_e4m3(bf16{static_cast<uint16>(lanes.bits[i])}, scale);
  uint64 word = 0;
  MOK_UNROLL
  for (int32 i = 0; i < 8; ++i) word |= static_cast<uint64>(codes[i]) << 8 * i;
  return word;
}

// Bytes and scales of `count` rows of H columns, each a row of token_row_bytes().
template <class Worker>
MOK_DEVICE void quantize_token_rows(const Call& call, Worker& worker, int32 count, const bf16* from, char* to) {
  const int32 width = call.shape.hidden_size, num_blocks = width / kMxBlock;
  const int64 pitch = call.shape.token_row_bytes();
  worker.for_each(count * num_blocks, [&](int32 i) {
    const int32 row = i / num_blocks, block = i % num_blocks;
    const auto* source = reinterpret_cast<const bf16x8*>(from + int64{row} * width) + 4 * block;
    char* dst = to + row * pitch;
    Lanes8 values[4];
    uint32 amax = 0;
    MOK_UNROLL
    for (int32 v = 0; v < 4; ++v) {
      values[v] = unpack(source[v]);
      amax = max_of(amax, max_magnitude(values[v]));
    }
    const uint32 scale = mx_scale(amax);
    MOK_UNROLL
    for (int32 v = 0; v < 4; ++v) reinterpret_cast<uint64*>(dst)[4 * block + v] = to_e4m3x8(values[v], scale);
    reinterpret_cast<unsigned char*>(dst)[width + block] = static_cast<unsigned char>(scale);
  });
}

// Rows of H columns: copied, in MXFP8 quantized on the way. A null source: zeros. A token's row is read once for each of
// its routes.
template <class Worker, class Dst, class Src>
MOK_DEVICE void bring_rows(const Call& call, Worker& worker, int32 count, Dst&& dst, Src&& src) {
  const int32 width = call.shape.hidden_size, num_blocks = width / kMxBlock;
  if (!call.shape.is_mxfp8())
    return worker.copy_rows(count, width * int64{sizeof(bf16)}, dst, src, /*are_sources_read_again=*/true);
  worker.for_each(count * num_blocks, [&](int32 i) {
    const int32 row = i / num_blocks, first = i % num_blocks * 4;
    auto* to = reinterpret_cast<bf16x8*>(dst(row)) + first;
    const bf16* from = src(row);
    if (from) return round_trip(reinterpret_cast<const bf16x8*>(from) + first, to);
    MOK_UNROLL
    for (int32 v = 0; v < 4; ++v) to[v] = bf16x8{};
  });
}

// The rows of a copy task to dst(i), each from its token's row of a region of its source; padding: zeros. `here(row)`:
// where this rank has the row already, or null.
template <class Worker, class Dst, class Here>
MOK_DEVICE void pull_token_rows(const Call& call, Worker& worker, const Task& task, Region region, Dst&& dst,
                                Here&& here) {
  const int32 first = task.block * call.shape.row_block() + task.part * kCopyRows;
  const int64 pitch = call.shape.token_row_bytes();
  const auto source = [&](int32 i) -> const char* {
    const int32 src_rank = call.schedule.peer_rank[first + i];
    if (src_rank < 0) return nullptr;
    if (const bf16* row = here(first + i)) return reinterpret_cast<const char*>(row);
    return call.peer<char>(region, src_rank) + call.schedule.peer_token_idx[first + i] / call.shape.topk * pitch;
  };
  if (!call.shape.is_mxfp8_wire())
    return bring_rows(call, worker, kCopyRows, dst, [&](int32 i) { return reinterpret_cast<const bf16*>(source(i)); });
  const int32 width = call.shape.hidden_size, num_blocks = width / kMxBlock;
  worker.for_each(kCopyRows * num_blocks, [&](int32 i) {
    const int32 row = i / num_blocks, block = i % num_blocks;
    auto* to = reinterpret_cast<bf16x8*>(dst(row)) + 4 * block;
    const char* from = source(row);
    const uint32 scale = from ? reinterpret_cast<const unsigned char*>(from)[width + block] : 0;
    MOK_UNROLL
    for (int32 v = 0; v < 4; ++v)
      to[v] = from ? from_e4m3x8(reinterpret_cast<const uint64*>(from)[4 * block + v], scale) : bf16x8{};
  });
}

// The sources of a copy task's rows have published their input.
template <class Worker>
MOK_DEVICE bool wait_row_sources(const Call& call, const Task& task, Signals<Worker>& signals) {
  SeenRanks& seen = signals.seen_inputs();
  if (seen.count() == call.shape.num_ranks) return true;
  const int32 first = task.part * kCopyRows, num_rows = num_valid_rows(call, task.block, first, kCopyRows);
  const int32* src_rank = call.schedule.peer_rank + int64{task.block} * call.shape.row_block() + first;
  for (int32 i = 0; i < num_rows; ++i)
    if (!signals.wait_rank_once(Edge::input_ready, src_rank[i], seen)) return false;
  return true;
}

// gate_up's side of x_ready: all rows of the block have come.
template <class Worker>
MOK_DEVICE bool wait_x_ready(const Call& call, int32 block, Signals<Worker>& signals) {
  if (!call.shape.is_push_dispatch) {
    const Grain grain = signal_grain(Edge::x_ready, call, block);
    return signals.wait_local(Edge::x_ready, grain.index, grain.want);
  }
  const int32 blocks = call.shape.is_minibatch_grain ? call.shape.blocks_per_slot() : 1;
  const int32 first_block = block / blocks * blocks;
  const int32 end_block = min_of(first_block + blocks, num_rows(call) / call.shape.row_block());
  for (int64 row = int64{first_block} * call.shape.row_block(); row < int64{end_block} * call.shape.row_block();
       ++row) {
    const int32 src_rank = call.schedule.peer_rank[row];
    if (src_rank >= 0 && !signals.wait_arrival(Edge::x_arrived, block / blocks, src_rank)) return false;
  }
  return true;
}

// What a copy task of `rows` rows reads and writes.
MOK_DEVICE int64 token_rows_bytes(const Call& call, int64 rows) {
  return rows * (call.shape.token_row_bytes() + call.shape.hidden_size * int64{sizeof(bf16)});
}

}  // namespace mok
