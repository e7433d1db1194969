// What the ranks of a model have: words, schedules and calls, as stage code reads them. Other regions are addresses alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "explore/model.h"
#include "protocol/signals.h"

namespace mok::explore {

using mok_explore::LaunchRow;
using mok_explore::Setup;

// A route of a rank: a token's row in a row block of its owner.
struct Route {
  int owner = -1, block = 0, row = 0;
};

class Ranks {
 public:
  explicit Ranks(const Setup& setup);

  const Shape& shape() const { return shape_; }
  int num_blocks(int rank) const;
  // Call number `call_idx` of a rank, which uses the context of call `context_of`. Counters start from zero.
  Call& begin_call(int rank, CallKind kind, const std::vector<LaunchRow>& launches, int call_idx, int context_of);
  const Call& call(int rank) const { return ranks_[static_cast<std::size_t>(rank)].call; }
  Epochs& epochs(int rank) { return at(rank).epochs; }
  // Cross-rank words after a reset, by their addresses.
  std::vector<std::pair<const Word*, Word>> words_after_reset(int rank, const Epochs& epochs);

  // The routes of a rank by number (token * topk + k); owner -1: none.
  const std::vector<Route>& routes(int rank) const { return ranks_[static_cast<std::size_t>(rank)].routes; }

  // "ring_x of rank 0": what an address belongs to, and where in it.
  std::string name_of(const void* address, std::int64_t* offset) const;

 private:
  struct Rank {
    std::vector<Word> words, arrivals, counters;
    Epochs epochs{};
    std::vector<char*> table;
    std::vector<std::vector<Route>> tokens;
    std::vector<Route> routes;
    std::vector<int32> peer_rank, peer_token_idx, segment_start, segment_num_rows, row_block_expert, window_start,
        generation_window, counts, route_rank, route_row, sorted_route, token_row;
    Call call;
  };
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  void make_rows(const Setup& setup, int rank);
  void make_tokens(int rank);
  void make_routes(int rank);
  char* region(int rank, Region region);
  template <class T>
  T* tensor(int call, int rank, int which) const;

  Shape shape_;
  bool is_pull_once_, is_zero_copy_;
  std::vector<Rank> ranks_;
};

}  // namespace mok::explore
