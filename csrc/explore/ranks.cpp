#include "explore/ranks.h"

#include <algorithm>
#include <stdexcept>

namespace mok::explore {
namespace {

constexpr int kNumTensors = 6;  // of a call, that belong to the caller
constexpr const char* kTensors[kNumTensors] = {"context_x",           "context_gate",      "context_up",
                                               "context_shared_gate", "context_shared_up", "the caller's x"};
constexpr int kAddressBits = 32;  // of an offset in a region; above them, what region it is
constexpr std::uintptr_t kFirstTensor = 1u << 24;

template <class T>
T* address_of(std::uintptr_t owner) {
  return reinterpret_cast<T*>(owner << kAddressBits);
}

}  // namespace

// Rows fill their blocks, and sources take turns; each route is a row of its own. A token has a route for every row of its
// rank in one row block, with pull once in all row blocks of a rank.
Ranks::Ranks(const Setup& setup)
    : is_pull_once_(setup.is_pull_once),
      is_zero_copy_(setup.is_zero_copy),
      ranks_(static_cast<std::size_t>(setup.num_ranks)) {
  int max_blocks = 1, max_experts = 1;
  for (const std::vector<int>& experts : setup.experts) {
    max_blocks = std::max(max_blocks, static_cast<int>(experts.size()));
    for (const int expert : experts) max_experts = std::max(max_experts, expert + 1);
  }
  shape_.num_ranks = setup.num_ranks;
  shape_.hidden_size = 2 * kDownCols;
  shape_.intermediate_size = 3 * kGateUpCols;
  shape_.shared_size = kGateUpCols;
  shape_.num_local_experts = max_experts;
  shape_.row_block_rows = shape_.minibatch = MOK_ROW_BLOCK;
  shape_.capacity_rows = max_blocks * shape_.row_block();
  shape_.ring_rows = min_of(setup.ring_blocks * shape_.row_block(), shape_.capacity_rows);
  shape_.is_push_dispatch = setup.is_push_dispatch;
  shape_.is_pull_combine = setup.is_pull_combine;
  shape_.is_pull_once = setup.is_pull_once;
  shape_.has_backward = setup.sequence.find('B') != std::string::npos;
  shape_.has_mxfp8_operands = setup.is_mxfp8;
  for (int rank = 0; rank < setup.num_ranks; ++rank) make_rows(setup, rank);
  for (int rank = 0; rank < setup.num_ranks; ++rank) make_tokens(rank);
  for (int rank = 0; rank < setup.num_ranks; ++rank) make_routes(rank);

  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    const auto words = [&](Region region) {
      return std::vector<Word>(static_cast<std::size_t>(region_bytes(region, shape_)) / sizeof(Word), 0);
    };
    at(rank).words = words(Region::words);
    at(rank).arrivals = words(Region::arrivals);
    at(rank).counters = words(Region::counters);
  }
  for (int rank = 0; rank < setup.num_ranks; ++rank)
    for (int peer = 0; peer < setup.num_ranks; ++peer)
      for (int i = 0; i < kNumRegions; ++i) {
        const auto each = static_cast<Region>(i);
        at(rank).table.push_back(peer == rank || is_symmetric(each, shape_) ? region(peer, each) : nullptr);
      }
}

char* Ranks::region(int rank, Region region) {
  Rank& r = at(rank);
  switch (region) {
    case Region::words:
      return reinterpret_cast<char*>(r.words.data());
    case Region::arrivals:
      return reinterpret_cast<char*>(r.arrivals.data());
    case Region::counters:
      return reinterpret_cast<char*>(r.counters.data());
    case Region::epochs:
      return reinterpret_cast<char*>(&r.epochs);
    default:
      return address_of<char>(static_cast<std::uintptr_t>(1 + rank * kNumRegions + static_cast<int>(region)));
  }
}

template <class T>
T* Ranks::tensor(int call, int rank, int which) const {
  const int owner = (call * shape_.num_ranks + rank) * kNumTensors + which;
  return address_of<T>(kFirstTensor + static_cast<std::uintptr_t>(owner));
}

std::string Ranks::name_of(const void* address, std::int64_t* offset) const {
  const auto bits = reinterpret_cast<std::uintptr_t>(address);
  *offset = static_cast<std::int64_t>(bits & ((std::uintptr_t{1} << kAddressBits) - 1));
  const std::uintptr_t owner = bits >> kAddressBits;
  const auto of_rank = [](const std::string& name, int rank) { return name + " of rank " + std::to_string(rank); };
  if (owner >= kFirstTensor) {
    const int at = static_cast<int>(owner - kFirstTensor), rank = at / kNumTensors % shape_.num_ranks;
    const int call = at / kNumTensors / shape_.num_ranks;
    return of_rank(kTensors[at % kNumTensors] + (" of call " + std::to_string(call)), rank);
  }
  const int at = static_cast<int>(owner) - 1;
  if (at < 0 || at >= shape_.num_ranks * kNumRegions) throw std::logic_error("an access of what no region holds");
  return of_rank(region_name(static_cast<Region>(at % kNumRegions)), at / kNumRegions);
}

int Ranks::num_blocks(int rank) const {
  return static_cast<int>(ranks_[static_cast<std::size_t>(rank)].row_block_expert.size());
}

// The table of rows, and windows of a row block each.
void Ranks::make_rows(const Setup& setup, int rank) {
  Rank& r = at(rank);
  const int row_block = shape_.row_block(), ring_blocks = shape_.ring_rows / row_block;
  const std::vector<int>& experts = setup.experts[static_cast<std::size_t>(rank)];
  const int num_blocks = static_cast<int>(experts.size());
  r.row_block_expert.assign(experts.begin(), experts.end());
  r.segment_num_rows.assign(static_cast<std::size_t>(shape_.num_local_experts), 0);
  for (const int expert : experts) r.segment_num_rows[static_cast<std::size_t>(expert)] += row_block;
  r.segment_start.assign(1, 0);
  for (const int32 rows : r.segment_num_rows) r.segment_start.push_back(r.segment_start.back() + rows);
  for (int block = 0; block < num_blocks; ++block) {
    const std::vector<int>& sources = setup.sources[static_cast<std::size_t>(rank)][static_cast<std::size_t>(block)];
    r.window_start.push_back(block);
    if (block % ring_blocks == 0) r.generation_window.push_back(block);
    for (int row = 0; row < row_block; ++row)
      r.peer_rank.push_back(sources[static_cast<std::size_t>(row) % sources.size()]);
  }
  r.peer_token_idx.assign(r.peer_rank.size(), -1);
  r.window_start.push_back(num_blocks);
  r.generation_window.push_back(num_blocks);
  r.counts.assign(kNumCounts, 0);
  r.counts[kCountRows] = num_blocks * row_block;
  r.counts[kCountWindows] = num_blocks;
}

// This rank's tokens, in the order of its routes' owners and rows.
void Ranks::make_tokens(int rank) {
  std::vector<std::vector<Route>>& tokens = at(rank).tokens;
  for (int owner = 0; owner < shape_.num_ranks; ++owner) {
    const std::vector<int32>& sources = at(owner).peer_rank;
    int last_block = -1;
    for (int row = 0; row < static_cast<int>(sources.size()); ++row) {
      if (sources[static_cast<std::size_t>(row)] != rank) continue;
      const int block = row / shape_.row_block();
      if (last_block < 0 || (block != last_block && !is_pull_once_)) tokens.emplace_back();
      last_block = block;
      tokens.back().push_back(Route{owner, block, row});
      shape_.topk = max_of(shape_.topk, static_cast<int32>(tokens.back().size()));
    }
  }
  shape_.max_tokens = max_of(shape_.max_tokens, static_cast<int32>(tokens.size()));
}

// Owners are sorted, and so are the experts of an owner's row blocks: routes come in the order of experts.
void Ranks::make_routes(int rank) {
  Rank& r = at(rank);
  const std::size_t num_routes = static_cast<std::size_t>(shape_.max_routes());
  r.routes.assign(num_routes, Route{});
  r.route_rank.assign(num_routes, -1);
  r.route_row.assign(num_routes, -1);
  for (std::size_t token = 0; token < r.tokens.size(); ++token) {
    const std::size_t first = token * static_cast<std::size_t>(shape_.topk);
    for (std::size_t k = 0; k < r.tokens[token].size(); ++k) {
      const Route& route = r.tokens[token][k];
      Rank& owner = at(route.owner);
      r.routes[first + k] = route;
      r.route_rank[first + k] = route.owner;
      r.route_row[first + k] = route.row;
      r.sorted_route.push_back(static_cast<int32>(first + k));
      owner.peer_token_idx[static_cast<std::size_t>(route.row)] = static_cast<int32>(first + k);
      owner.token_row.resize(static_cast<std::size_t>(shape_.num_ranks * shape_.max_tokens), -1);
      int32& first_row = owner.token_row[static_cast<std::size_t>(rank * shape_.max_tokens) + token];
      if (first_row < 0) first_row = route.row;
    }
  }
  r.counts[kCountRoutes] = static_cast<int32>(r.sorted_route.size());
}

Call& Ranks::begin_call(int rank, CallKind kind, const std::vector<LaunchRow>& launches, int call_idx, int context_of) {
  Rank& r = at(rank);
  std::fill(r.counters.begin(), r.counters.end(), Word{0});
  r.call = Call{};
  Call& call = r.call;
  call.shape = shape_;
  call.kind = kind;
  call.fingerprint = 1;
  call.rank = rank;
  call.num_tokens = static_cast<int32>(r.tokens.size());
  for (const LaunchRow& launch : launches) call.add_group(launch.group);
  call.place_counters();
  call.regions = r.table.data();
  std::copy_n(call.regions + rank * kNumRegions, kNumRegions, call.own);
  call.schedule = Schedule{r.peer_rank.data(),         r.peer_token_idx.data(),   r.segment_start.data(),
                           r.segment_num_rows.data(),  r.row_block_expert.data(), r.window_start.data(),
                           r.generation_window.data(), r.counts.data(),           r.route_rank.data(),
                           r.route_row.data(),         r.sorted_route.data(),     r.token_row.data()};
  if (kind == CallKind::schedule) return call;
  const bool is_in_place = is_zero_copy_ && !call.is_backward();
  call.tensors.x = is_in_place ? call.at<bf16>(Region::x) : tensor<bf16>(call_idx, rank, 5);
  call.tensors.context_x = tensor<bf16>(context_of, rank, 0);
  call.tensors.context_gate = tensor<bf16>(context_of, rank, 1);
  call.tensors.context_up = tensor<bf16>(context_of, rank, 2);
  call.tensors.context_shared_gate = tensor<bf16>(context_of, rank, 3);
  call.tensors.context_shared_up = tensor<bf16>(context_of, rank, 4);
  return call;
}

std::vector<std::pair<const Word*, Word>> Ranks::words_after_reset(int rank, const Epochs& epochs) {
  std::vector<Word>& words = at(rank).words;
  std::fill(words.begin(), words.end(), Word{0});
  std::fill(at(rank).arrivals.begin(), at(rank).arrivals.end(), Word{0});
  reset_words(words.data(), epochs, shape_);
  std::vector<std::pair<const Word*, Word>> out;
  for (const std::vector<Word>* each : {&words, &at(rank).arrivals})
    for (const Word& word : *each) out.emplace_back(&word, word);
  return out;
}

}  // namespace mok::explore
