// Needs and publishes of the stages, recorded instead of done.
#pragma once

#include <stdexcept>
#include <vector>

#include "explore/model.h"
#include "protocol/signals.h"

namespace mok::explore {

using mok_explore::Op;

// A wait or a publish.
struct Record {
  Op op;  // wait, wait_exact, set, add or arrive
  Edge edge;
  int64 index;
  const Word* word;
  Word value;               // wanted, set or added; of an arrive: the total
  int32 src_rank, at_rank;  // whose word it is, and where
  Word count = 1;
  int skip = 0;  // of an arrive: records after it that are the last arriver's
  bool operator==(const Record&) const = default;
};

// The Worker of the explorer's target. Every wait is recorded and over at once; no signal is sent. Of arrivals it is always
// the last, but for one, by its number among them.
class Worker {
 public:
  Worker(const Args& args, int num_workers, int not_last)
      : args_(args), num_workers_(num_workers), not_last_(not_last) {}

  std::vector<Record> records;
  SeenRanks seen_inputs, seen_dones;
  int num_arrivals() const { return num_arrivals_; }

  int num_workers() const { return num_workers_; }
  Word draw(Word* counter) { return add_release(counter, 1); }
  void begin_wait(const Wait& wait) {
    const Op op = wait.kind == WaitKind::at_least ? Op::wait : Op::wait_exact;
    const int32 own = args_.call.rank;
    const Record record{op, wait.edge, wait.index, wait.word, wait.want, wait.peer < 0 ? own : wait.peer, own};
    for (const Record& before : records)
      if (before == record) return;  // words only grow
    records.push_back(record);
  }
  bool pause(const Args&, const Wait& wait) {
    *const_cast<Word*>(wait.word) = wait.kind == WaitKind::entered ? wait.own_entered : wait.want;
    return true;
  }
  void end_wait(const Wait&) {}
  void fail(const Args&, const Wait&) { throw std::logic_error("all ranks of a model make the same call"); }
  void report_abort(const Args&) { throw std::logic_error("no call of a model is aborted while it is recorded"); }
  bool may_publish(Edge edge, int64 index, int32 dst_rank, Word value, Word total) {
    const int32 own = args_.call.rank;
    if (is_cross_rank(edge)) {
      const bool is_arrival = row_of(edge).cells == Cells::block_words;
      const Word* word = is_arrival ? args_.arrival(edge, index, own, dst_rank)
                                    : args_.word(edge, args_.epoch_of(edge), own, dst_rank);
      const Word number = edge == Edge::entered ? value >> kEnteredBits : value;
      records.push_back({Op::set, edge, index, word, number, own, dst_rank});
      return false;
    }
    Word* word = args_.counter(edge, index);
    if (total == 0) {
      records.push_back({Op::add, edge, index, word, value, own, own});
      return false;
    }
    records.push_back({Op::arrive, edge, index, word, total, own, own, value});
    *word = total - value;
    return num_arrivals_++ != not_last_;
  }

 private:
  const Args& args_;
  const int num_workers_, not_last_;
  int num_arrivals_ = 0;
};

// What `f(worker)` waits for and publishes. What follows an arrival for the last arriver alone is what is missing when it
// is not the last.
template <class F>
std::vector<Record> record(const Args& args, int num_workers, F&& f) {
  Worker worker(args, num_workers, -1);
  f(worker);
  std::vector<Record> records = std::move(worker.records);
  for (int i = 0, at = 0; i < worker.num_arrivals(); ++i, ++at) {
    while (records[static_cast<std::size_t>(at)].op != Op::arrive) ++at;
    Worker other(args, num_workers, i);
    f(other);
    const std::size_t begin = static_cast<std::size_t>(at) + 1, skip = records.size() - other.records.size();
    std::vector<Record> rest(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(begin));
    rest.insert(rest.end(), records.begin() + static_cast<std::ptrdiff_t>(begin + skip), records.end());
    for (std::size_t j = 0; j < rest.size(); ++j) rest[j].skip = other.records[j].skip;
    if (rest != other.records) throw std::logic_error("what follows an arrival for the last arriver is no block");
    records[static_cast<std::size_t>(at)].skip = static_cast<int>(skip);
  }
  return records;
}

}  // namespace mok::explore
