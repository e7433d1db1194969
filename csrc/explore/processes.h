// Which workers there are: from the kernels of every rank to the processes of a model.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "explore/model.h"
#include "protocol/roster.h"

namespace mok::explore {

using mok_explore::Action;

struct ModelTask {
  Stage stage;
  int block;
  std::vector<Action> actions;
  int name;
};

struct Kernel {
  std::vector<ModelTask> tasks, compute_tasks;  // in the order of tickets; the second where roles are apart
  bool has_roles = false;
  std::vector<Action> leaving;  // what follows the tasks of a worker
  int stream = 0;
  bool is_join = false;
  int role_word = -1,
      comm_arrivals = 0;  // where a CTA's role follows from its arrival: a bit for those that communicate
};

// A word of the model's own, or of a recorded wait or signal.
int add_word(mok_explore::Model& model, const std::string& name);

class Processes {
 public:
  static constexpr int kNumCtas = 2;  // of a kernel on a GPU

  // Both are kept by reference.
  Processes(const mok_explore::Setup& setup, mok_explore::Model& model);

  // After what a rank has done so far.
  void place(int rank, int call, const std::vector<Kernel>& kernels);
  // When all calls so far are over.
  void reset(int call);
  void finish();

 private:
  using Process = mok_explore::Process;
  struct Over {
    int word = -1, count = 0;
  };
  Process& lane(const Kernel& kernel, int rank, int role);
  std::vector<Action> actions_of(const std::vector<ModelTask>& tasks) const;
  std::vector<Action> of_any_role(const Kernel& kernel, int claim) const;
  void place_alone(int rank, const std::vector<Action>& before, const std::vector<Action>& actions,
                   const Action& leave);
  static void append(Process& process, const std::vector<Action>& before, const std::vector<Action>& actions,
                     const Action& leave);
  static Action start(const Over& over) { return Action{mok_explore::Op::start, over.word, over.count}; }

  const mok_explore::Setup& setup_;
  mok_explore::Model& model_;
  std::vector<std::vector<Process>> lanes_;  // by rank: workers that go through many kernels
  Process host_{0, {}, {}};
  std::vector<Over> ended_;  // by rank: its last call
  Over opened_;              // the last reset
};

}  // namespace mok::explore
