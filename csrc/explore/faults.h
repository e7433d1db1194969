// Planted faults: what a recording, an order of tasks or a cell is changed to, for the search to find.
#pragma once

#include <string>
#include <vector>

#include "explore/processes.h"
#include "explore/recorder.h"
#include "protocol/tasks.h"

namespace mok::explore {

class Faults {
 public:
  explicit Faults(const std::string& fault) : fault_(fault) {}
  bool is(const char* name) const { return fault_ == name; }

  // Records of a task (of a worker's way out, where it has none), changed.
  std::vector<Record> planted(const Args& args, Stage stage, const Task& task, std::vector<Record> records);
  // A recomputation that does not wait at its end. That is right by itself where the caller does not write the input, and
  // lets other faults show.
  bool returns_early(const Call& call) const;
  bool sends_no_done(const Call& call) const;
  void end_call(const Args& args);
  // By which launch CTAs are counted.
  Launch role_launch(const Launch& launch) const;
  // Windows in one order across generations.
  void interleave(std::vector<ModelTask>& tasks, const Call& call) const;
  // Weight gradients in the kernel of down_dgrad.
  void move_wgrad(std::vector<Kernel>& kernels) const;

 private:
  bool is_dropped(const Call& call, Stage stage, const Task& task, const Record& record);
  void change(const Args& args, Stage stage, Record& record) const;

  const std::string fault_;
  bool is_lost_ = false;
  Word last_done_epoch_ = 0;
};

}  // namespace mok::explore
