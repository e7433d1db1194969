#include "targets/host/workspace.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "protocol/edge_table.h"
#include "targets/host/runtime.h"

namespace mok::host {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kMaxPoisonBytes = std::size_t{1} << 28;

bool holds_words(Region region) {
  return region == Region::words || region == Region::arrivals || region == Region::counters ||
         region == Region::epochs || region == Region::num_tokens;
}

}  // namespace

Workspace::Workspace(int num_ranks)
    : num_ranks_(num_ranks), memory_(static_cast<std::size_t>(num_ranks * kNumRegions)) {
  if (num_ranks < 1 || num_ranks > kMaxRanks)
    throw std::invalid_argument("num_ranks must be 1 to " + std::to_string(kMaxRanks) + ", not " +
                                std::to_string(num_ranks));
}

void Workspace::reserve(const Shape& shape) {
  if (shape.num_ranks != num_ranks_) throw std::invalid_argument("shape is for another number of ranks");
  const auto counters = [](const Shape& s) { return std::pair(bank_size(false, s), bank_size(true, s)); };
  const bool is_moved = counters(shape) != counters(shape_) ||
                        counter_offset(Edge::tickets, 0, shape) != counter_offset(Edge::tickets, 0, shape_);
  // All of it or nothing: where memory runs out, the workspace stays as it is.
  std::vector<Memory> grown(memory_.size());
  for (int rank = 0; rank < num_ranks_; ++rank)
    for (int i = 0; i < kNumRegions; ++i) {
      const auto bytes = static_cast<std::size_t>(region_bytes(static_cast<Region>(i), shape));
      if (bytes <= memory(rank, static_cast<Region>(i)).num_bytes) continue;
      Memory& m = grown[static_cast<std::size_t>(rank * kNumRegions + i)];
      m.data.reset(new char[bytes + kAlignment]);
      m.num_bytes = bytes;
    }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (int i = 0; i < kNumRegions; ++i) {
      const auto region = static_cast<Region>(i);
      Memory& m = grown[static_cast<std::size_t>(rank * kNumRegions + i)];
      if (!m.data) continue;
      if (holds_words(region) || m.num_bytes < kMaxPoisonBytes)
        std::memset(m.data.get(), holds_words(region) ? 0 : 0xff, m.num_bytes + kAlignment);
      memory(rank, region) = std::move(m);
    }
    if (is_moved && memory(rank, Region::counters).data)
      std::memset(memory(rank, Region::counters).data.get(), 0, memory(rank, Region::counters).num_bytes + kAlignment);
  }
  shape_ = shape;
  make_tables();
}

void Workspace::make_tables() {
  tables_.assign(static_cast<std::size_t>(num_ranks_), std::vector<char*>(memory_.size(), nullptr));
  for (int rank = 0; rank < num_ranks_; ++rank)
    for (int peer = 0; peer < num_ranks_; ++peer)
      for (int i = 0; i < kNumRegions; ++i)
        if (peer == rank || is_symmetric(static_cast<Region>(i), shape_))
          tables_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer * kNumRegions + i)] =
              region(peer, region_name(static_cast<Region>(i))).first;
}

std::pair<char*, std::size_t> Workspace::region(int rank, const std::string& name) const {
  for (int i = 0; i < kNumRegions; ++i) {
    if (name != region_name(static_cast<Region>(i))) continue;
    const Memory& m = memory(rank, static_cast<Region>(i));
    const auto address = reinterpret_cast<std::uintptr_t>(m.data.get());
    return {reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment), m.num_bytes};
  }
  throw std::invalid_argument("no region has the name '" + name + "'");
}

std::shared_ptr<char[]> Workspace::hold(int rank, const std::string& name) const {
  for (int i = 0; i < kNumRegions; ++i)
    if (name == region_name(static_cast<Region>(i))) return memory(rank, static_cast<Region>(i)).data;
  return nullptr;
}

std::vector<Word> Workspace::epochs(int rank) const {
  const auto* e = reinterpret_cast<const Epochs*>(region(rank, "epochs").first);
  return {e->call, e->schedule, e->order, e->generation};
}

void Workspace::reset() {
  Epochs agreed{};
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::vector<Word> e = epochs(rank);
    agreed = Epochs{std::max(agreed.call, e[0] + 1), std::max(agreed.schedule, e[1] + 1),
                    std::max(agreed.order, e[2] + 1), std::max(agreed.generation, e[3] + 1)};
  }
  for (int rank = 0; rank < num_ranks_; ++rank) {
    *reinterpret_cast<Epochs*>(region(rank, "epochs").first) = agreed;
    for (const char* name : {"counters", "arrivals", "words"}) {
      const auto [data, bytes] = region(rank, name);
      if (bytes) std::memset(data, 0, bytes);
    }
    reset_words(reinterpret_cast<Word*>(region(rank, "words").first), agreed, shape_);
  }
}

void Workspace::satisfy(uint32 fingerprint, CallKind kind) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    Call call;
    call.shape = shape_;
    call.kind = kind;
    call.fingerprint = fingerprint;
    call.rank = rank;
    call.regions = table(rank);
    std::copy_n(call.regions + rank * kNumRegions, kNumRegions, call.own);
    call.place_counters();
    const Args args(call);
    for (int i = 0; i < kNumEdges; ++i) {
      const Edge edge = static_cast<Edge>(i);
      if (!is_cross_rank(edge) && !is_schedule_edge(edge) && users_of(edge).readers)
        std::fill_n(args.counter(edge, 0), num_counters(row_of(edge), shape_), kPlenty);
    }
    for (int src = 0; src < num_ranks_; ++src) {
      *args.word(Edge::entered, args.order, src, rank) = entered_word(args);
      *args.word(Edge::input_ready, args.call_epoch, src, rank) = args.call_epoch;
      *args.word(Edge::done, args.call_epoch, src, rank) = args.call_epoch;
      *args.word(Edge::done, args.call_epoch - 1, src, rank) = args.call_epoch - 1;  // publish waits for it
    }
    const auto [arrivals, num_bytes] = region(rank, region_name(Region::arrivals));
    std::fill_n(reinterpret_cast<Word*>(arrivals), num_bytes / sizeof(Word), args.call_epoch);
  }
}

std::size_t Workspace::num_bytes() const {
  std::size_t total = 0;
  for (const Memory& m : memory_) total += m.num_bytes;
  return total;
}

void Workspace::set_runtime(Runtime* runtime) {
  const std::lock_guard lock(runtime_mutex_);
  runtime_ = runtime;
}

void Workspace::interrupt() {
  const std::lock_guard lock(runtime_mutex_);
  if (runtime_) runtime_->interrupt();
}

}  // namespace mok::host
