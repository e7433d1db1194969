// Faults that are planted in a run, to see what a user would then get to see.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "protocol/tasks.h"

namespace mok::host {

struct Fault {
  enum class Kind {
    drop,       // a signal is lost on its way
    delay,      // a signal comes late
    duplicate,  // a signal comes twice
    corrupt,    // one arrival counts `amount` more (or less) than it should
    stop,       // a rank draws no further task
    stall,      // tasks of a stage begin late, or never
  };
  Kind kind = Kind::drop;
  Edge edge = Edge::entered;
  Stage stage = Stage::publish;  // stall
  int rank = 0;                  // that publishes, stops or stalls
  int dst_rank = -1;             // -1: any
  long long index = -1;          // of the edge, or row block of the stage; -1: any
  long long after = 0;           // stop: tasks that the rank still draws
  double amount = 0;             // delay and stall: steps or seconds, stall 0: for ever; corrupt: what is added
};

Fault::Kind fault_kind_by_name(const std::string& name);  // throws std::invalid_argument

// The faults of one run, asked for at every draw, task and publish.
class Faults {
 public:
  explicit Faults(std::vector<Fault> faults) : faults_(std::move(faults)), hits_(faults_.size()) {}
  bool is_empty() const { return faults_.empty(); }

  struct Publish {
    bool is_lost = false;
    double delay = 0;
    long long surplus = 0;  // arrivals to add beside the real one
  };
  Publish at_publish(Edge edge, int rank, long long index, int dst_rank);
  bool is_stopped(int rank);                             // at each draw
  const Fault* stall(const Task& task, int rank) const;  // null: none

 private:
  std::vector<Fault> faults_;
  std::vector<std::atomic<long long>> hits_;
};

}  // namespace mok::host
