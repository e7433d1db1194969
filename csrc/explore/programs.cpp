// From a setup to a model: every rank's launches, their tasks in the order of protocol/tasks.h, what each waits for and
// publishes, which workers there are, and planted faults. Recorded waits and signals are held against the edge table.
#include <algorithm>
#include <stdexcept>

#include "explore/faults.h"
#include "explore/processes.h"
#include "explore/recorder.h"
#include "explore/task_actions.h"
#include "protocol/edge_table.h"
#include "protocol/leave.h"
#include "stages/schedule.h"

namespace mok::explore {

using namespace mok_explore;

namespace {

constexpr int kEpochAfterReset = 20;

class Builder {
 public:
  explicit Builder(const Setup& setup)
      : setup_(setup), R_(setup.num_ranks), ranks_(setup), faults_(setup.fault), processes_(setup, model_) {
    model_.num_ranks = R_;
    model_.is_careless = faults_.is("writes_after_false_wait");
  }

  Model build() {
    for (const char kind : setup_.sequence) {
      if (kind == 'R') {
        reset();
        continue;
      }
      ++call_;
      for (rank_ = 0; rank_ < R_; ++rank_)
        ranks_.begin_call(rank_, kind_of(kind), rows_of(kind), call_, context_of(kind));
      const Args args(ranks_.call(0));  // epochs move on when the last kernel is left
      for (rank_ = 0; rank_ < R_; ++rank_) processes_.place(rank_, call_, kernels_of(kind));
      faults_.end_call(args);
    }
    set_reset_words();
    processes_.finish();
    return std::move(model_);
  }

 private:
  // ---- calls ----

  static CallKind kind_of(char kind) {
    return kind == 'S'   ? CallKind::schedule
           : kind == 'F' ? CallKind::forward
           : kind == 'C' ? CallKind::recompute
                         : CallKind::backward;
  }
  const std::vector<LaunchRow>& rows_of(char kind) const {
    const auto found = setup_.launches.find(kind);
    if (found == setup_.launches.end()) throw std::invalid_argument(std::string("no launches for a call ") + kind);
    return found->second;
  }
  // A backward belongs to the latest forward that has none yet; a recomputed context takes its place.
  int context_of(char kind) {
    if (rank_ > 0) return context_;
    context_ = call_;
    if (kind == 'F' || kind == 'C') contexts_.push_back(call_);
    if (kind != 'B') return context_;
    if (contexts_.empty()) throw std::invalid_argument("a backward without a forward: " + setup_.sequence);
    context_ = contexts_.back();
    contexts_.pop_back();
    return context_;
  }

  std::vector<Kernel> kernels_of(char kind) {
    const Call& call = ranks_.call(rank_);
    const Args args(call);
    std::vector<Kernel> kernels;
    for (const LaunchRow& row : rows_of(kind)) {
      Launch launch;
      launch.group = row.group;
      for (int i = 0; i < kNumStages; ++i)
        if (row.stage == stage_name(static_cast<Stage>(i))) launch.stage = static_cast<Stage>(i);
      launch.launch_idx = static_cast<int32>(kernels.size());
      launch.generation = row.generation;
      launch.has_prologue = row.has_prologue;
      launch.is_last_group = row.is_last_group;
      launch.has_experts_in_turn = row.has_experts_in_turn;
      Kernel kernel;
      kernel.stream = row.stream;
      kernel.is_join = row.is_join;
      kernel.has_roles = row.has_roles && (setup_.workers == Workers::streams || setup_.workers == Workers::ctas);
      if (kind == 'S')
        kernel.tasks = schedule(args);
      else
        kernel.tasks = tasks_of(args, launch, kernel.has_roles ? Role::communication : Role::any);
      if (kernel.has_roles) kernel.compute_tasks = tasks_of(args, launch, Role::compute);
      if (kernel.has_roles && setup_.workers == Workers::ctas && row.num_comm_ctas > 0) {
        const Launch counting = faults_.role_launch(launch);
        const int64 index = role_counter(counting);
        kernel.role_word = word({Op::add, Edge::tickets, index, args.counter(Edge::tickets, index), 1, rank_, rank_});
        for (int arrival = 0; arrival < 31; ++arrival)
          if (only_communicates(arrival, min_of(row.num_comm_ctas, Processes::kNumCtas / 2)))
            kernel.comm_arrivals |= 1 << arrival;
      }
      kernel.leaving = leaving(args, launch, kernel.has_roles ? 2 : 1);
      kernels.push_back(std::move(kernel));
    }
    if (faults_.is("order_across_generations")) faults_.interleave(kernels.front().tasks, call);
    if (faults_.is("wgrad_beside_down_dgrad")) faults_.move_wgrad(kernels);
    return kernels;
  }

  // ---- tasks ----

  std::vector<ModelTask> tasks_of(const Args& args, const Launch& launch, Role role) {
    TaskSequence<true> sequence(args, launch, role);
    Worker tickets(args, 1, -1);
    std::vector<ModelTask> tasks;
    for (Task task; sequence.next(tickets, &task);) {
      begin(task.stage, task.block, name_of(args.call, task));
      const bool is_zero_copy = setup_.is_zero_copy && task.stage == Stage::publish && !args.call.is_backward();
      if (is_zero_copy) act(Op::write, cell("x of rank " + std::to_string(rank_)), version_of(call_));  // by the caller
      if (!(task.stage == Stage::reduce && faults_.returns_early(args.call))) run(args, task);
      tasks.push_back(end());
    }
    return tasks;
  }
  void run(const Args& args, const Task& task) {
    add(faults_.planted(args, task.stage, task, recorded_needs(args, task)));
    for (const Access& access : accesses_of(ranks_, args.call, task, call_, context_))
      act(access.op, cell(access.cell), access.version);
    add(faults_.planted(args, task.stage, task, recorded_publishes(args, task)));
    const bool has_output = args.call.kind == CallKind::forward || args.call.has_dgrad();
    if (task.stage == Stage::reduce && has_output) act(Op::finish, 0, 0);
  }

  static std::string at(const std::string& name, int a, int b = -1) {
    return name + "[" + std::to_string(a) + (b < 0 ? "" : "," + std::to_string(b)) + "]";
  }
  static std::string name_of(const Call& call, const Task& task) {
    const std::string name = stage_name(task.stage);
    if (!is_windowed(task.stage)) return name;
    if (task.stage == Stage::wgrad)
      return at(name, task.expert, task.part) + " in macrobatch " +
             std::to_string(block_macrobatch(call.shape, task.block));
    if (task.stage == Stage::dispatch && call.shape.is_push_dispatch) return at("push dispatch", task.part);
    if (task.stage == Stage::combine && call.shape.is_pull_combine) return at("pull combine", task.part);
    return at(call.is_backward() && holds(kReplay, task.stage) ? "replayed " + name : name, task.block,
              is_product(task.stage) ? task.part : -1);
  }

  // The tasks of a schedule, as in csrc/split/schedule.cu.
  std::vector<ModelTask> schedule(const Args& args) {
    const int parity = static_cast<int>(args.schedule_epoch & 1);
    const auto ids = [&](int dst, int src) {
      return cell(at("ids", faults_.is("one_id_region") ? 0 : parity, src) + " of rank " + std::to_string(dst));
    };
    const auto tokens = [&](int dst, int src) {
      return cell(at("num_tokens", faults_.is("tokens_in_topk_word") ? 0 : parity, src) + " of rank " +
                  std::to_string(dst));
    };
    constexpr const char* kNames[] = {"push of ids", "count of ids", "layout", "place of ids"};
    std::vector<ModelTask> tasks;
    for (const ScheduleStage::Part part : {ScheduleStage::Part::pushes, ScheduleStage::Part::rest}) {
      ScheduleTask task;
      for (int64 ticket = 0; ScheduleStage::decode(args.call, part, ticket, &task); ++ticket) {
        const bool is_by_source = task.kind == ScheduleTask::count || task.kind == ScheduleTask::place;
        const std::string name = kNames[task.kind];
        begin(Stage::schedule, 0, is_by_source ? at(name, task.src_rank) : name);
        const auto recorded = [&](auto&& f) {
          add(record(args, 1, [&](Worker& worker) {
            Signals<Worker> signals(args, worker);
            f(signals);
          }));
        };
        recorded([&](auto& signals) { ScheduleStage::needs(args, task, signals); });
        for (int dst = 0; dst < R_ && task.kind == ScheduleTask::push; ++dst) {
          act(Op::write, ids(dst, rank_), version_of(call_));
          act(Op::write, tokens(dst, rank_), version_of(call_));
        }
        if (is_by_source) {
          act(Op::read, tokens(rank_, task.src_rank), version_of(call_));
          act(Op::read, ids(rank_, task.src_rank), version_of(call_));
        }
        recorded([&](auto& signals) { ScheduleStage::publishes(args, task, signals); });
        tasks.push_back(end());
      }
    }
    return tasks;
  }

  // A worker's way out of a kernel.
  std::vector<Action> leaving(const Args& args, const Launch& launch, int num_workers) {
    begin(launch.group ? first_of(launch.group) : launch.stage, 0, "last worker out");
    if (setup_.is_expiry_allowed && launch.is_last_group) act(Op::draw, 0, 0);
    const bool is_last = launch.group == 0 && (launch.stage == Stage::reduce || launch.stage == Stage::schedule);
    const Edge exited = launch.stage == Stage::schedule ? Edge::schedule_exited : Edge::exited;
    if (!faults_.sends_no_done(args.call))
      add(faults_.planted(args, task_.stage, Task{}, record(args, num_workers, [&](Worker& worker) {
                            if (is_last)
                              leave_call(args, exited, launch, worker);
                            else
                              leave_last_group(args, launch, worker);
                          })));
    return end().actions;
  }

  void begin(Stage stage, int block, const std::string& name) {
    model_.tasks.push_back(TaskName{rank_, call_, name});
    task_ = ModelTask{stage, block, {}, static_cast<int>(model_.tasks.size()) - 1};
  }
  ModelTask end() { return std::move(task_); }
  void act(Op op, int object, int value, int skip = 0, int count = 1) {
    task_.actions.push_back(Action{op, object, value, skip, task_.name, count});
  }
  void add(const std::vector<Record>& records) {
    for (const Record& each : records) {
      const bool is_wait = each.op == Op::wait || each.op == Op::wait_exact;
      if (!(is_wait ? waits_for(task_.stage, each.edge) : writes(task_.stage, each.edge)))
        throw std::logic_error(std::string(stage_name(task_.stage)) + (is_wait ? " waits for " : " signals ") +
                               edge_name(each.edge) + ": not in the edge table");
      model_.used_edges |= std::uint64_t{1} << static_cast<int>(each.edge);
      const Word value = each.op == Op::add ? each.count * each.value : each.value;
      act(each.op, word(each), static_cast<int>(value), each.skip, static_cast<int>(each.count));
    }
  }

  // ---- words and cells ----

  // Counters have banks that are cleared: here each call has its own.
  int word(const Record& record) {
    const auto [found, is_new] = words_.try_emplace({is_cross_rank(record.edge) ? 0 : call_, record.word},
                                                    static_cast<int>(model_.words.size()));
    if (!is_new) return found->second;
    std::string name = edge_name(record.edge);
    if (row_of(record.edge).cells == Cells::block_words)
      name = at(name, static_cast<int>(record.index), record.src_rank);
    else
      name = at(name, is_cross_rank(record.edge) ? record.src_rank : static_cast<int>(record.index));
    if (row_of(record.edge).cells == Cells::two_words && !faults_.is("done_without_parity"))
      name += record.value & 1 ? " odd" : " even";
    name += " of rank " + std::to_string(record.at_rank);
    if (!is_cross_rank(record.edge)) name += ", call " + std::to_string(call_);
    add_word(model_, name);
    return found->second;
  }
  int cell(const std::string& name) {
    const auto [found, is_new] = cells_.try_emplace(name, static_cast<int>(model_.cells.size()));
    if (is_new) {
      model_.cells.push_back(name);
      model_.initial_cells.push_back(0);
    }
    return found->second;
  }

  // Epochs go on above all others.
  void reset() {
    processes_.reset(call_);
    const Epochs agreed{kEpochAfterReset, kEpochAfterReset, kEpochAfterReset, 1};
    for (int rank = 0; rank < R_; ++rank) {
      ranks_.epochs(rank) = agreed;
      for (const auto& [address, value] : ranks_.words_after_reset(rank, agreed)) reset_values_[address] = value;
    }
  }
  // The model knows all its words only in the end.
  void set_reset_words() {
    for (const auto& [key, id] : words_) {
      const auto found = reset_values_.find(key.second);
      if (found == reset_values_.end()) continue;
      const bool is_done = model_.words[static_cast<std::size_t>(id)].starts_with(edge_name(Edge::done));
      const bool is_zeroed = is_done && faults_.is("reset_zeroes_done");
      model_.reset_words.emplace_back(id, is_zeroed ? 0 : static_cast<int>(found->second));
    }
  }

  const Setup& setup_;
  const int R_;
  Ranks ranks_;
  Faults faults_;
  Model model_;
  Processes processes_;
  std::map<std::pair<int, const Word*>, int> words_;
  std::map<std::string, int> cells_;
  std::map<const Word*, Word> reset_values_;
  ModelTask task_{};
  std::vector<int> contexts_;  // calls whose context no backward has used
  int rank_ = 0, call_ = 0, context_ = 0;
};

}  // namespace
}  // namespace mok::explore

namespace mok_explore {

Model make_model(const Setup& setup) {
  const std::vector<std::string> names = fault_names();
  if (!setup.fault.empty() && std::find(names.begin(), names.end(), setup.fault) == names.end())
    throw std::invalid_argument("no fault of the protocol has the name '" + setup.fault + "'");
  if (setup.sequence.find_first_not_of("SFCBR") != std::string::npos)
    throw std::invalid_argument("a sequence is made of S, F, C, B and R, got '" + setup.sequence + "'");
  return mok::explore::Builder(setup).build();
}

}  // namespace mok_explore
