// The memory of a group of host ranks: every region of layout.h, once a rank.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace mok::host {

class Runtime;

class Workspace {
 public:
  explicit Workspace(int num_ranks);

  // Makes every region large enough. Fresh data regions are full of NaN, those of 256 MiB and more are left to the
  // system, which gives them pages where they are touched; words and counters are zero.
  // Counters stand at offsets that depend on the shape: when that changes they start from zero.
  void reserve(const Shape& shape);

  // What rank `rank` sees: its own regions, and of a peer the symmetric ones only, so that an access
  // to anything else fails here as it would between processes.
  char* const* table(int rank) const { return tables_[static_cast<std::size_t>(rank)].data(); }

  std::pair<char*, std::size_t> region(int rank, const std::string& name) const;
  // The memory behind a region: who holds it may use the address even when the workspace has grown meanwhile.
  std::shared_ptr<char[]> hold(int rank, const std::string& name) const;

  // Agrees on new epochs after an aborted call: counters are zeroed, done words and epochs set to one
  // value above all others, and the generation moves on, so that a stale abort is ignored.
  void reset();

  // Makes every wait of the next call true beforehand, of a forward or a backward, so that one stage can run alone on
  // data that is laid out for it. Tickets and what counts a kernel's own arrivals (exited, pushed) are left as they are: the
  // stage uses them as ever. `fingerprint` is that of the calls to come.
  void satisfy(uint32 fingerprint, CallKind kind);

  std::vector<Word> epochs(int rank) const;  // call, schedule, order, generation
  std::size_t num_bytes() const;

  void set_runtime(Runtime* runtime);
  void interrupt();

 private:
  struct Memory {
    std::shared_ptr<char[]> data;
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
  std::mutex runtime_mutex_;
  Runtime* runtime_ = nullptr;
};

}  // namespace mok::host
