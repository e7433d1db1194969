// A model of a sequence of calls: what is left of the protocol without arithmetic. Processes wait for words, set them, and
// read and write cells; a cell holds the version that was last written to it, and a read knows which one it must find.
// Words only grow, but for a reset.
//
// Waits, signals, their counts and the order of tasks are those of csrc/stages and csrc/protocol, recorded (recorder.h),
// and the launches are the targets' own. Made here are cells (task_actions.cpp), processes and planted
// faults.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

// Not in mok: that is another name in the explorer's target (target.h).
namespace mok_explore {

enum class Op : std::uint8_t {
  wait,        // word >= value
  wait_exact,  // word == value
  set,         // word = value
  add,         // word += value
  arrive,      // word += count; whoever does not make it `value` goes on after the next `skip` actions
  role,        // word += 1, which was n; where bit n of `value` is not set, goes on after the next `skip` actions
  jump,        // goes on after the next `skip` actions
  read,        // of a cell that must hold version `value`
  write,       // of version `value` to a cell
  draw,        // of a task: none after an abort
  start,       // wait of a kernel for those before it: order of launches, which always comes
  leave,       // the kernel's end for those after it
  finish,      // a rank has its output: an error if it was made of what a false wait let through
  reset,       // words get the model's reset values, aborts are forgotten
};

// Versions: of a call and a row block, of the carry of a macrobatch, or of a call alone.
constexpr int kVersionsOfCall = 64, kCarryVersion = 16, kQuantizedVersion = 32, kWholeVersion = 62;

struct Action {
  Op op;
  int object = 0;
  int value = 0;
  int skip = 0;
  int task = 0;
  int count = 1;
};

struct TaskName {
  int rank, call;
  std::string text;
};

// One worker: what it does in order, and where it goes on when a wait was given up or a draw sees the abort.
struct Process {
  int rank;
  std::vector<Action> actions;
  std::vector<int> exit;
};

struct Model {
  int num_ranks = 0;
  std::vector<std::string> words, cells;
  std::vector<int> initial_words, initial_cells;
  std::vector<std::pair<int, int>> reset_words;
  std::vector<TaskName> tasks;
  std::vector<Process> processes;
  bool is_careless = false;      // planted: goes on after a false wait
  std::uint64_t used_edges = 0;  // bits of the edges that a wait or signal is of
};

// ---- what is explored ----

enum class Workers {
  one,      // one for all kernels of a rank: the fewest
  streams,  // one for each stream, and where a kernel holds both kinds of tasks one for each role
  tasks,    // one for each task: the most
  ctas,     // a GPU's: two CTAs for each stream; where some only communicate, a CTA's role follows from its arrival
};

// A kernel launch of a call as the target makes it (Launch in layout.h, and its place among the others).
struct LaunchRow {
  unsigned group = 0;  // windowed stages, 0 for the others
  std::string stage;   // which of the others
  int generation = -1;
  bool has_prologue = false, is_last_group = false, has_experts_in_turn = false;
  int num_comm_ctas = 0;
  int stream = 0;
  bool is_join = false;    // after the kernels of both streams
  bool has_roles = false;  // its communication and compute tasks are drawn by different workers
};

// A fault that must be found, by name (see fault_names()).
struct Setup {
  std::string sequence;  // S schedule, F forward, C recompute, B backward, R abort and reset
  int num_ranks = 2;
  std::map<char, std::vector<LaunchRow>> launches;     // of each kind of call
  int ring_blocks = 2;                                 // row blocks of the ring, a slot each
  std::vector<std::vector<int>> experts;               // [rank][block]: local expert
  std::vector<std::vector<std::vector<int>>> sources;  // [rank][block]: ranks that its rows come from
  Workers workers = Workers::one;
  bool is_push_dispatch = false, is_pull_combine = false;
  bool is_pull_once = false;       // a source has one token for all row blocks of a rank
  bool is_mxfp8 = false;           // operands of weight gradients are quantized, in place
  bool is_zero_copy = false;       // the caller writes the published input itself, between calls
  std::string fault;               // empty: the protocol as it is
  bool is_expiry_allowed = false;  // any one wait may be given up
};

Model make_model(const Setup& setup);  // throws std::invalid_argument
std::vector<std::string> fault_names();

// ---- exploration ----

struct Event {
  int rank, call;
  std::string task, text;
};

struct Verdict {
  bool is_ok = true;
  bool is_complete = true;  // no state was left unvisited
  long long num_states = 0, num_steps = 0;
  std::string violation;
  std::vector<Event> story;  // what leads there, without what does not matter
};

Verdict search(const Model& model, bool is_expiry_allowed, bool is_reduced, long long max_states);

}  // namespace mok_explore
