// The memory of a group of host ranks: every region of layout.h, once a rank.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"

namespace mok::host {

class Runtime;

class Workspace {
 public:
  explicit Workspace(int num_ranks);

  // Makes every region large enough. Fresh data regions are full of NaN; words and counters are zero.
  // Counters stand at offsets that depend on the shape: when that changes they start from zero.
  void reserve(const Shape& shape);

  // What rank `rank` sees: its own regions, and of a peer the symmetric ones only, so that an access
  // to anything else fails here as it would between processes.
  char* const* table(int rank) const { return tables_[static_cast<std::size_t>(rank)].data(); }

  std::pair<char*, std::size_t> region(int rank, const std::string& name) const;

  // Agrees on new epochs after an aborted call: counters are zeroed, done words and epochs set to one
  // value above all others, and the generation moves on, so that a stale abort is ignored.
  void reset();

  std::vector<Word> epochs(int rank) const;  // call, schedule, order, generation
  std::size_t num_bytes() const;

  void set_runtime(Runtime* runtime) { runtime_.store(runtime); }
  void interrupt();

 private:
  struct Memory {
    std::unique_ptr<char[]> data;
    std::size_t num_bytes = 0;
  };
  Memory& memory(int rank, Region region) {
    return memory_[static_cast<std::size_t>(rank * kNumRegions + static_cast<int>(region))];
  }
  const Memory& memory(int rank, Region region) const { return const_cast<Workspace*>(this)->memory(rank, region); }
  void make_tables();

  int num_ranks_;
  Shape shape_;
  std::vector<Memory> memory_;
  std::vector<std::vector<char*>> tables_;
  std::atomic<Runtime*> runtime_{nullptr};
};

}  // namespace mok::host
