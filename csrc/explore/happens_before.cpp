// The happens-before checker: every access to a region in a real run of the real stage code is ordered, by signals and
// by launches, with every other access to the same place that one of the two writes.
//
// The stage code is compiled with the calls that a thread sanitizer would get; here they come instead. Each worker has
// a vector clock. An addition or a store releases it into the word's history; a wait that is satisfied takes the clocks
// of the first `want` arrivals, and no more than it waited for, so that one run finds a missing edge whatever its
// interleaving was. Two calls of a rank are ordered as its launches are; ranks are ordered by signals alone, though in
// this process all end a call together. Tickets order nothing.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "targets/host/runtime.h"

namespace mok::host {
namespace {

using Clock = std::vector<std::uint32_t>;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

struct Access {
  std::uint32_t worker = 0, time = 0;  // time 0: none
  Stage stage = Stage::publish;
  int block = 0, part = 0;
};

struct Place {
  Access write;
  std::vector<Access> reads;    // since that write, the last of each worker
  std::vector<Access> atomics;  // likewise; they do not disturb each other
};

struct Memory {
  std::string name;
  int rank;
  std::uintptr_t begin, end;
  std::size_t grain;  // bytes that are told apart
  std::size_t row_bytes;
  bool is_kept;  // between calls; else the caller's own tensor, which may be freed
  std::vector<Place> places;
};

struct Release {
  Word value;  // of the word behind it
  Clock clock;
};

class Checker final : public Observer {
 public:
  std::vector<std::string> races;
  long long num_races = 0, num_accesses = 0, num_releases = 0;
  bool is_on = false;

  void begin_run(const std::vector<RankProgram>& programs) override {
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      const Call& call = programs[rank].call;
      if (call_end_.size() < programs.size()) call_end_.resize(programs.size());
      forget_moved_counters(call);
      for (int i = 0; i < kNumRegions; ++i) {
        const auto region = static_cast<Region>(i);
        const auto bytes = static_cast<std::size_t>(region_bytes(region, call.shape));
        const bool is_words = region == Region::words || region == Region::arrivals || region == Region::counters;
        add(region_name(region), static_cast<int>(rank), call.own[i], bytes, is_words ? 8 : 4,
            row_bytes(region, call.shape), true);
      }
      add_tables(static_cast<int>(rank), call);
    }
    streams_.assign(programs.size() * 2, {});
    unordered_.clear();
    is_on = true;
  }
  void end_run() override {
    is_on = false;
    for (std::size_t rank = 0; rank < call_end_.size(); ++rank)
      for (std::size_t stream = 0; stream < 2; ++stream)
        if (rank * 2 + stream < streams_.size()) join(call_end_[rank], streams_[rank * 2 + stream]);
    std::erase_if(memories_, [](const auto& memory) { return !memory.second.is_kept; });
    last_ = nullptr;
    numbers_.clear();
  }
  void start(const Worker& worker, int stream, bool is_join) override {
    const auto rank = static_cast<std::size_t>(worker.rank());
    const auto id = static_cast<std::uint32_t>(clocks_.size());
    Clock clock = call_end_[rank];
    join(clock, streams_[rank * 2 + static_cast<std::size_t>(stream)]);
    if (is_join) join(clock, streams_[rank * 2 + 1 - static_cast<std::size_t>(stream)]);
    clock.resize(id + 1, 0);
    clock[id] = 1;
    clocks_.push_back(std::move(clock));
    names_.push_back("rank " + std::to_string(worker.rank()));
    numbers_[&worker] = id;
  }
  void resume(const Worker& worker) override {
    worker_ = &worker;
    current_ = numbers_.at(&worker);
  }
  void leave(const Worker& worker, int stream) override {
    const std::uint32_t id = numbers_.at(&worker);
    join(streams_[static_cast<std::size_t>(worker.rank()) * 2 + static_cast<std::size_t>(stream)], clocks_[id]);
    clocks_[id] = Clock();
    numbers_.erase(&worker);
  }
  void draw(const Word* counter) override { unordered_.insert(counter); }
  void satisfied(const Wait& wait) override {
    waited_ = wait.word;
    want_ = wait.want;
    is_exact_ = wait.kind != WaitKind::at_least;
  }

  // ---- what the instrumented code does ----

  void access(std::uintptr_t address, std::size_t size, bool is_write) {
    if (!is_on || !size) return;
    Memory* memory = find(address);
    if (!memory) return;
    ++num_accesses;
    const std::size_t first = (address - memory->begin) / memory->grain;
    const std::size_t last = (std::min(address + size, memory->end) - 1 - memory->begin) / memory->grain;
    for (std::size_t i = first; i <= last; ++i) {
      Place& place = memory->places[i];
      check(*memory, i, place.write, is_write ? "writes" : "reads", "written");
      if (is_write) {
        for (const Access& read : place.reads) check(*memory, i, read, "writes", "read");
        for (const Access& atomic : place.atomics) check(*memory, i, atomic, "writes", "used as a signal");
        place.reads.clear();
        place.atomics.clear();
        place.write = now();
        if (memory->grain == 8) histories_.erase(reinterpret_cast<const Word*>(memory->begin + i * 8));
      } else {
        note(place.reads);
      }
    }
  }
  void atomic(const Word* word) {
    Memory* memory = find(reinterpret_cast<std::uintptr_t>(word));
    if (!memory || memory->grain != 8) return;
    const std::size_t i = (reinterpret_cast<std::uintptr_t>(word) - memory->begin) / 8;
    check(*memory, i, memory->places[i].write, "uses as a signal", "cleared");
    note(memory->places[i].atomics);
  }
  void release(const Word* word, Word value) {
    if (!is_on || !find(reinterpret_cast<std::uintptr_t>(word))) return;
    atomic(word);
    if (unordered_.count(word)) return;
    ++num_releases;
    auto& history = histories_[word];
    // A word that is set keeps a few values: nobody waits for older ones.
    if (history.size() >= 4096) history.erase(history.begin());
    history.push_back(Release{value, clocks_[current_]});
    ++clocks_[current_][current_];
  }
  void acquire(const Word* word, Word value) {
    if (!is_on || !find(reinterpret_cast<std::uintptr_t>(word))) return;
    atomic(word);
    const auto found = histories_.find(word);
    const bool is_waited = waited_ == word;
    waited_ = nullptr;
    if (found == histories_.end()) return;
    // Arrivals add up; a set word needs the one store that has brought it there.
    Word before = 0;
    for (const Release& release : found->second) {
      if (is_waited && !is_exact_ && before >= want_) break;
      if (is_waited && is_exact_ && release.value != value) continue;
      join(clocks_[current_], release.clock);
      before = release.value;
    }
  }

 private:
  // Counters stand elsewhere when the shape changes, and start from zero there.
  void forget_moved_counters(const Call& call) {
    std::vector<int32> starts(call.counter_start, call.counter_start + kNumEdges);
    starts.push_back(call.call_bank);
    starts.push_back(call.schedule_bank);
    if (counter_starts_.size() <= static_cast<std::size_t>(call.rank)) counter_starts_.resize(call.rank + 1);
    std::vector<int32>& known = counter_starts_[static_cast<std::size_t>(call.rank)];
    if (known == starts) return;
    known = std::move(starts);
    std::erase_if(memories_, [&](const auto& memory) {
      if (memory.second.name != "counters" || memory.second.rank != call.rank) return false;
      std::erase_if(histories_, [&](const auto& history) {
        const auto at = reinterpret_cast<std::uintptr_t>(history.first);
        return at >= memory.second.begin && at < memory.second.end;
      });
      return true;
    });
    last_ = nullptr;
  }
  static std::size_t row_bytes(Region region, const Shape& s) {
    switch (region) {
      case Region::ring_gate:
      case Region::ring_up:
      case Region::ring_hidden:
        return static_cast<std::size_t>(s.intermediate_size) * 2;
      case Region::shared_hidden:
        return static_cast<std::size_t>(s.shared_size) * 2;
      case Region::x:
      case Region::combine:
      case Region::ring_x:
      case Region::ring_y:
      case Region::shared_y:
        return static_cast<std::size_t>(s.hidden_size) * 2;
      default:
        return 8;
    }
  }
  void add(const std::string& name, int rank, const void* data, std::size_t bytes, std::size_t grain,
           std::size_t row_bytes, bool is_kept) {
    if (!data || !bytes) return;
    const bool is_signals = grain == 8;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    const auto found = memories_.find(begin);
    if (is_kept && found != memories_.end() && found->second.end >= begin + bytes && found->second.name == name) return;
    // A region that has moved: what stood there before is gone.
    for (auto memory = memories_.begin(); memory != memories_.end();) {
      const bool is_old = (memory->second.name == name && memory->second.rank == rank) ||
                          (memory->second.begin < begin + bytes && begin < memory->second.end);
      if (is_old && is_signals)
        std::erase_if(histories_, [&](const auto& history) {
          const auto at = reinterpret_cast<std::uintptr_t>(history.first);
          return at >= memory->second.begin && at < memory->second.end;
        });
      memory = is_old ? memories_.erase(memory) : std::next(memory);
    }
    Memory memory{name, rank, begin, begin + bytes, grain, std::max<std::size_t>(row_bytes, grain), is_kept, {}};
    memory.places.resize((bytes + grain - 1) / grain);
    memories_[begin] = std::move(memory);
    last_ = nullptr;
  }
  void add_tables(int rank, const Call& call) {
    const Schedule& s = call.schedule;
    const auto rows = static_cast<std::size_t>(call.shape.capacity_rows);
    const auto routes = static_cast<std::size_t>(call.num_tokens) * static_cast<std::size_t>(call.shape.topk);
    const auto experts = static_cast<std::size_t>(call.shape.num_local_experts);
    const auto table = [&](const char* name, const int32* data, std::size_t count) {
      add(std::string("schedule.") + name, rank, data, count * 4, 4, 4, false);
    };
    table("peer_rank", s.peer_rank, rows);
    table("peer_token_idx", s.peer_token_idx, rows);
    table("segment_start", s.segment_start, experts + 1);
    table("segment_num_rows", s.segment_num_rows, experts);
    table("row_block_expert", s.row_block_expert, rows / static_cast<std::size_t>(call.shape.row_block()));
    table("route_rank", s.route_rank, routes);
    table("route_row", s.route_row, routes);
    table("sorted_route", s.sorted_route, routes);
    if (call.shape.is_pull_once)
      table("token_row", s.token_row, static_cast<std::size_t>(call.shape.num_ranks * s.token_row_stride));
    const Tensors& t = call.tensors;
    const auto rows_of = [&](const char* name, const bf16* data, int64 count, int32 width) {
      const auto row = static_cast<std::size_t>(width) * 2;
      add(name, rank, data, static_cast<std::size_t>(count) * row, 4, row, false);
    };
    rows_of("context.x", t.context_x, call.shape.ring_rows, call.shape.hidden_size);
    rows_of("context.gate", t.context_gate, call.shape.ring_rows, call.shape.intermediate_size);
    rows_of("context.up", t.context_up, call.shape.ring_rows, call.shape.intermediate_size);
    rows_of("output", t.output, call.num_tokens, call.shape.hidden_size);
  }

  Memory* find(std::uintptr_t address) {
    if (last_ && address >= last_->begin && address < last_->end) return last_;
    auto after = memories_.upper_bound(address);
    if (after == memories_.begin()) return nullptr;
    Memory& memory = std::prev(after)->second;
    if (address >= memory.end) return nullptr;
    last_ = &memory;
    return last_;
  }
  Access now() const {
    const Task& task = worker_->task();
    return Access{current_, clocks_[current_][current_], task.stage, task.block, task.part};
  }
  void note(std::vector<Access>& list) const {
    for (Access& access : list)
      if (access.worker == current_) {
        access = now();
        return;
      }
    // What is ordered before this access says nothing any more.
    const Clock& clock = clocks_[current_];
    std::erase_if(list, [&](const Access& access) {
      return access.worker < clock.size() && access.time <= clock[access.worker] && access.worker != current_;
    });
    list.push_back(now());
  }
  void check(const Memory& memory, std::size_t place, const Access& other, const char* does, const char* was) {
    if (!other.time || other.worker == current_) return;
    const Clock& clock = clocks_[current_];
    if (other.worker < clock.size() && other.time <= clock[other.worker]) return;
    ++num_races;
    if (races.size() >= 20) return;
    const Task& task = worker_->task();
    const auto text = [](Stage stage, int block, int part) {
      return std::string(stage_name(stage)) + " " + std::to_string(block) + "." + std::to_string(part);
    };
    std::string race = "rank " + std::to_string(worker_->rank()) + ", " + text(task.stage, task.block, task.part) +
                       ", " + does + " " + memory.name + "[" + std::to_string(place * memory.grain / memory.row_bytes) +
                       "] of rank " + std::to_string(memory.rank) + ", which " + names_[other.worker] + ", " +
                       text(other.stage, other.block, other.part) + ", has " + was + ", and nothing orders the two";
    if (std::find(races.begin(), races.end(), race) == races.end()) races.push_back(std::move(race));
  }

  std::map<std::uintptr_t, Memory> memories_;
  Memory* last_ = nullptr;
  std::vector<Clock> clocks_, streams_, call_end_;
  std::vector<std::string> names_;
  std::unordered_map<const Worker*, std::uint32_t> numbers_;
  std::unordered_map<const Word*, std::vector<Release>> histories_;
  std::unordered_set<const Word*> unordered_;
  std::vector<std::vector<int32>> counter_starts_;  // by rank
  const Worker* worker_ = nullptr;
  std::uint32_t current_ = 0;
  const Word* waited_ = nullptr;
  Word want_ = 0;
  bool is_exact_ = false;
};

Checker checker;

}  // namespace

// For the extension: starts anew, or hands out what was found.
void start_happens_before() {
  checker = Checker();
  observer = &checker;
}
std::vector<std::string> happens_before_races(long long* num_races, long long* num_accesses, long long* num_releases) {
  *num_races = checker.num_races;
  *num_accesses = checker.num_accesses;
  *num_releases = checker.num_releases;
  return checker.races;
}

namespace {
void seen(const void* address, std::size_t size, bool is_write) {
  checker.access(reinterpret_cast<std::uintptr_t>(address), size, is_write);
}
}  // namespace

}  // namespace mok::host

// ---- what instrumented code calls ----

using mok::host::checker;
using mok::host::seen;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_read_range(void* address, std::size_t size) { seen(address, size, false); }
void __tsan_write_range(void* address, std::size_t size) { seen(address, size, true); }

#define MOK_ACCESS(size)                                                          \
  void __tsan_read##size(void* address) { seen(address, size, false); }           \
  void __tsan_write##size(void* address) { seen(address, size, true); }           \
  void __tsan_unaligned_read##size(void* address) { seen(address, size, false); } \
  void __tsan_unaligned_write##size(void* address) { seen(address, size, true); }
MOK_ACCESS(1)
MOK_ACCESS(2)
MOK_ACCESS(4)
MOK_ACCESS(8)
MOK_ACCESS(16)
#undef MOK_ACCESS

#define MOK_ATOMIC(bits, type)                                                                                        \
  type __tsan_atomic##bits##_load(const volatile type* a, int order) {                                                \
    const type value = __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                          \
    if (bits == 64 && order != __ATOMIC_RELAXED)                                                                      \
      checker.acquire(reinterpret_cast<const mok::Word*>(const_cast<const type*>(a)), static_cast<mok::Word>(value)); \
    return value;                                                                                                     \
  }                                                                                                                   \
  void __tsan_atomic##bits##_store(volatile type* a, type value, int) {                                               \
    __atomic_store_n(a, value, __ATOMIC_SEQ_CST);                                                                     \
    if (bits == 64)                                                                                                   \
      checker.release(reinterpret_cast<const mok::Word*>(const_cast<type*>(a)), static_cast<mok::Word>(value));       \
  }                                                                                                                   \
  type __tsan_atomic##bits##_fetch_add(volatile type* a, type value, int) {                                           \
    const type before = __atomic_fetch_add(a, value, __ATOMIC_SEQ_CST);                                               \
    if (bits == 64)                                                                                                   \
      checker.release(reinterpret_cast<const mok::Word*>(const_cast<type*>(a)),                                       \
                      static_cast<mok::Word>(before) + static_cast<mok::Word>(value));                                \
    return before;                                                                                                    \
  }                                                                                                                   \
  type __tsan_atomic##bits##_fetch_sub(volatile type* a, type value, int) {                                           \
    return __atomic_fetch_sub(a, value, __ATOMIC_SEQ_CST);                                                            \
  }                                                                                                                   \
  type __tsan_atomic##bits##_exchange(volatile type* a, type value, int) {                                            \
    return __atomic_exchange_n(a, value, __ATOMIC_SEQ_CST);                                                           \
  }
MOK_ATOMIC(8, unsigned char)
MOK_ATOMIC(32, unsigned int)
MOK_ATOMIC(64, unsigned long long)
#undef MOK_ATOMIC

// Copies whose length is known at run time alone.
void* __real_memcpy(void* to, const void* from, std::size_t size);
void* __wrap_memcpy(void* to, const void* from, std::size_t size) {
  seen(from, size, false);
  seen(to, size, true);
  return __real_memcpy(to, from, size);
}
void* __real_memset(void* to, int value, std::size_t size);
void* __wrap_memset(void* to, int value, std::size_t size) {
  seen(to, size, true);
  return __real_memset(to, value, size);
}

}  // extern "C"
