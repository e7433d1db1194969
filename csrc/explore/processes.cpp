#include "explore/processes.h"

#include <array>

namespace mok::explore {

using namespace mok_explore;

int add_word(Model& model, const std::string& name) {
  model.words.push_back(name);
  model.initial_words.push_back(0);
  return static_cast<int>(model.words.size()) - 1;
}

Processes::Processes(const Setup& setup, Model& model)
    : setup_(setup),
      model_(model),
      lanes_(static_cast<std::size_t>(setup.num_ranks)),
      ended_(static_cast<std::size_t>(setup.num_ranks)) {
  const std::size_t num_lanes = std::array<std::size_t, 4>{1, 2, 0, 4}[static_cast<std::size_t>(setup.workers)];
  for (int rank = 0; rank < setup.num_ranks; ++rank)
    lanes_[static_cast<std::size_t>(rank)].assign(num_lanes, Process{rank, {}, {}});
}

void Processes::finish() {
  for (auto& rank : lanes_)
    for (Process& process : rank) model_.processes.push_back(std::move(process));
  if (!host_.actions.empty()) model_.processes.push_back(std::move(host_));
}

void Processes::reset(int call) {
  std::vector<Action> before;
  for (const Over& each : ended_) before.push_back(start(each));
  opened_ = Over{add_word(model_, "reset after call " + std::to_string(call)), 1};
  append(host_, before, {Action{Op::reset}}, Action{Op::leave, opened_.word, 1});
}

void Processes::place(int rank, int call, const std::vector<Kernel>& kernels) {
  const std::string prefix = "launch of rank " + std::to_string(rank) + ", call " + std::to_string(call) + ", ";
  Over& ended = ended_[static_cast<std::size_t>(rank)];
  std::vector<Over> gone;  // who has left a kernel
  for (std::size_t k = 0; k < kernels.size(); ++k) {
    const Kernel& kernel = kernels[k];
    const int num_tasks = static_cast<int>(kernel.tasks.size());
    const int num_workers = setup_.workers == Workers::tasks ? num_tasks + 1 : kernel.has_roles ? 2 : 1;
    std::vector<Action> before;
    for (const Over& each : {opened_, ended})
      if (each.word >= 0) before.push_back(start(each));
    for (std::size_t other = 0; other < k; ++other)
      if (kernel.is_join || kernels[other].stream == kernel.stream) before.push_back(start(gone[other]));
    gone.push_back(Over{add_word(model_, prefix + std::to_string(k)), num_workers});
    const Action leave{Op::leave, gone[k].word, 1};
    if (setup_.workers == Workers::tasks) {
      for (const ModelTask& task : kernel.tasks) place_alone(rank, before, actions_of({task}), leave);
      before.push_back(start(Over{gone[k].word, num_tasks}));
      place_alone(rank, before, kernel.leaving, leave);
    } else if (kernel.role_word >= 0) {
      const int claim = add_word(model_, prefix + std::to_string(k) + ", compute tasks");
      for (int cta = 0; cta < kNumCtas; ++cta)
        append(lane(kernel, rank, cta), before, of_any_role(kernel, claim), leave);
    } else {
      for (int role = 0; role < num_workers; ++role) {
        std::vector<Action> actions = actions_of(role == 0 ? kernel.tasks : kernel.compute_tasks);
        actions.insert(actions.end(), kernel.leaving.begin(), kernel.leaving.end());
        append(lane(kernel, rank, role), before, actions, leave);
      }
    }
  }
  ended = gone.back();
}

Process& Processes::lane(const Kernel& kernel, int rank, int role) {
  const int at = setup_.workers == Workers::one    ? 0
                 : setup_.workers == Workers::ctas ? kNumCtas * kernel.stream + role
                 : kernel.has_roles                ? role
                                                   : kernel.stream;
  return lanes_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(at)];
}

std::vector<Action> Processes::actions_of(const std::vector<ModelTask>& tasks) const {
  std::vector<Action> actions;
  for (const ModelTask& task : tasks) {
    if (setup_.is_expiry_allowed) actions.push_back(Action{Op::draw, 0, 0, 0, task.name});
    actions.insert(actions.end(), task.actions.begin(), task.actions.end());
  }
  return actions;
}

// A CTA communicates or computes. The compute tasks are drawn by the first that comes to them.
std::vector<Action> Processes::of_any_role(const Kernel& kernel, int claim) const {
  const std::vector<Action> comm = actions_of(kernel.tasks), compute = actions_of(kernel.compute_tasks);
  const int num_comm = static_cast<int>(comm.size()), num_compute = static_cast<int>(compute.size());
  std::vector<Action> actions{Action{Op::role, kernel.role_word, kernel.comm_arrivals, num_comm + 1}};
  actions.insert(actions.end(), comm.begin(), comm.end());
  actions.push_back(Action{Op::jump, 0, 0, num_compute + 1});
  actions.push_back(Action{Op::arrive, claim, 1, num_compute});
  actions.insert(actions.end(), compute.begin(), compute.end());
  actions.insert(actions.end(), kernel.leaving.begin(), kernel.leaving.end());
  return actions;
}

void Processes::place_alone(int rank, const std::vector<Action>& before, const std::vector<Action>& actions,
                            const Action& leave) {
  Process process{rank, {}, {}};
  append(process, before, actions, leave);
  model_.processes.push_back(std::move(process));
}

// Whoever gives up, or draws no task, goes on where the kernel is left.
void Processes::append(Process& process, const std::vector<Action>& before, const std::vector<Action>& actions,
                       const Action& leave) {
  process.actions.insert(process.actions.end(), before.begin(), before.end());
  process.actions.insert(process.actions.end(), actions.begin(), actions.end());
  process.actions.push_back(leave);
  process.exit.resize(process.actions.size(), static_cast<int>(process.actions.size()) - 1);
}

}  // namespace mok::explore
