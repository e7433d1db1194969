// Breadth-first search through all interleavings of a model, with state hashing.
//
// Partial-order reduction: an action that nothing can disturb, whatever the others do before it, is done at once
// (it is a persistent set of its own). What the others can do before it is found by letting them run as far as they get
// while this process stands still: words only grow, so that is one run, and it takes in more than is possible. Without
// waits that expire nearly every action of a right protocol is of this kind, and a fault is where one is not.
#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "explore/model.h"

namespace mok_explore {
namespace {

using Cell = std::uint16_t;
constexpr Cell kGarbage = 0xffff;
constexpr Cell kTainted = 0x100, kPoisoned = 0x200;  // in a mode: went on after a false wait; has read what that left

struct Hash {
  std::uint64_t a, b;
  bool operator==(const Hash& other) const { return a == other.a && b == other.b; }
};
struct HashOfHash {
  std::size_t operator()(const Hash& hash) const { return hash.a; }
};

// Everything of a state in one row: [pc][mode][words][cells][abort bits][expiries left].
class Search {
 public:
  Search(const Model& model, bool is_expiry_allowed, bool is_reduced)
      : m_(model),
        P_(model.processes.size()),
        W_(model.words.size()),
        size_(2 * P_ + W_ + model.cells.size() + 2),
        is_reduced_(is_reduced && !(model.is_careless && is_expiry_allowed)) {
    initial_.assign(size_, 0);
    for (std::size_t i = 0; i < W_; ++i) word(initial_, i) = static_cast<Cell>(model.initial_words[i]);
    for (std::size_t i = 0; i < model.cells.size(); ++i) cell(initial_, i) = static_cast<Cell>(model.initial_cells[i]);
    initial_[size_ - 1] = is_expiry_allowed ? 1 : 0;
  }

  Verdict run(long long max_states) {
    State first = initial_;
    std::vector<Step> none;
    if (!settle(first, nullptr)) return violated(-1, none);
    std::vector<State> level{first};
    std::vector<int> ids{0};
    parents_.push_back({-1, {}});
    visited_.insert(hash(first));
    verdict_.num_states = 1;
    while (!level.empty()) {
      std::vector<State> next;
      std::vector<int> next_ids;
      for (std::size_t i = 0; i < level.size(); ++i) {
        const std::vector<Step> moves = moves_of(level[i]);
        const bool is_stuck = std::none_of(moves.begin(), moves.end(), [](const Step& s) { return !s.is_expiry; });
        if (is_stuck && !is_finished(level[i])) {
          is_stuck_ = true;
          failure_ = "nobody can go on: " + waits_of(level[i]);
          return violated(ids[i], {});
        }
        for (const Step& step : moves) {
          State state = level[i];
          if (!execute(state, step, nullptr) || !settle(state, nullptr)) return violated(ids[i], {step});
          if (!visited_.insert(hash(state)).second) continue;
          if (++verdict_.num_states > max_states) {
            verdict_.is_complete = false;
            return verdict_;
          }
          next_ids.push_back(static_cast<int>(parents_.size()));
          parents_.push_back({ids[i], step});
          next.push_back(std::move(state));
        }
      }
      level = std::move(next);
      ids = std::move(next_ids);
    }
    return verdict_;
  }

 private:
  using State = std::vector<Cell>;
  struct Step {
    int process = -1;
    bool is_expiry = false;
  };
  struct Parent {
    int id;
    Step step;
  };
  struct Logged {
    int process, pc;
    Cell value;  // of the word or cell before
    bool is_expiry, is_given_up;
    int telling;  // the rank that is told of an abort, counted from 1
  };

  Cell& pc(State& s, std::size_t p) const { return s[p]; }
  Cell pc(const State& s, std::size_t p) const { return s[p]; }
  Cell mode(const State& s, std::size_t p) const { return s[P_ + p]; }
  Cell& mode(State& s, std::size_t p) const { return s[P_ + p]; }
  Cell& word(State& s, std::size_t w) const { return s[2 * P_ + w]; }
  Cell word(const State& s, std::size_t w) const { return s[2 * P_ + w]; }
  Cell& cell(State& s, std::size_t c) const { return s[2 * P_ + W_ + c]; }
  Cell cell(const State& s, std::size_t c) const { return s[2 * P_ + W_ + c]; }
  Cell& aborts(State& s) const { return s[size_ - 2]; }
  // Ranks whose call has failed stand in the same cell as those that were told, eight bits up.
  bool has_failed(const State& s, int rank) const { return s[size_ - 2] >> (8 + rank) & 1; }
  void fail(State& s, std::size_t p) const {
    s[size_ - 2] = static_cast<Cell>(s[size_ - 2] | 0x100u << m_.processes[p].rank);
  }
  bool is_aborted(const State& s, int rank) const { return s[size_ - 2] >> rank & 1; }
  bool is_done(const State& s, std::size_t p) const { return pc(s, p) >= m_.processes[p].actions.size(); }
  const Action& next(const State& s, std::size_t p) const { return m_.processes[p].actions[pc(s, p)]; }
  bool is_finished(const State& s) const {
    for (std::size_t p = 0; p < P_; ++p)
      if (!is_done(s, p)) return false;
    return true;
  }
  static bool is_wait(Op op) { return op == Op::wait || op == Op::wait_exact; }
  bool is_satisfied(const State& s, const Action& a) const {
    const Cell have = word(s, static_cast<std::size_t>(a.object));
    return a.op == Op::wait_exact ? have == a.value : have >= a.value;
  }

  std::vector<Step> moves_of(const State& s) const {
    std::vector<Step> moves;
    for (std::size_t p = 0; p < P_; ++p) {
      if (is_done(s, p)) continue;
      const Action& a = next(s, p);
      const int process = static_cast<int>(p);
      if (mode(s, p) & 0xff) {
        moves.push_back({process, false});
      } else if (a.op == Op::start) {
        if (is_satisfied(s, a)) moves.push_back({process, false});
      } else if (is_wait(a.op) && !is_satisfied(s, a)) {
        if (is_aborted(s, m_.processes[p].rank)) moves.push_back({process, false});
        if (s[size_ - 1] > 0) moves.push_back({process, true});
      } else {
        moves.push_back({process, false});
      }
    }
    return moves;
  }

  // false: a violation, told in failure_.
  bool execute(State& s, const Step& step, std::vector<Logged>* log) {
    ++verdict_.num_steps;
    const auto p = static_cast<std::size_t>(step.process);
    const Process& process = m_.processes[p];
    const int at = pc(s, p);
    const Action& a = process.actions[static_cast<std::size_t>(at)];
    const auto object = static_cast<std::size_t>(a.object);
    const bool is_tainted = mode(s, p) & kTainted;
    if (log) {
      const bool is_cell = a.op == Op::read || a.op == Op::write;
      const int telling = mode(s, p) & 0xff;
      log->push_back({step.process, at, is_cell ? cell(s, object) : word(s, object), step.is_expiry,
                      is_wait(a.op) && !is_satisfied(s, a), telling});
    }
    if (step.is_expiry) {
      s[size_ - 1] -= 1;
      mode(s, p) = static_cast<Cell>(mode(s, p) + 1);
      return true;
    }
    if (const int telling = mode(s, p) & 0xff) {  // the abort goes out to one rank after the other
      aborts(s) = static_cast<Cell>(aborts(s) | 1u << (telling - 1));
      mode(s, p) = static_cast<Cell>(telling == m_.num_ranks ? 0 : telling + 1);
      if (telling == m_.num_ranks) give_up(s, p);
      return true;
    }
    pc(s, p) = static_cast<Cell>(at + 1);
    switch (a.op) {
      case Op::wait:
      case Op::wait_exact:
        if (!is_satisfied(s, a)) {
          pc(s, p) = static_cast<Cell>(at);
          give_up(s, p);
        }
        return true;
      case Op::set:
        word(s, object) = static_cast<Cell>(a.value);
        return true;
      case Op::add:
      case Op::leave:
        word(s, object) = static_cast<Cell>(word(s, object) + a.value);
        return true;
      case Op::arrive:
        word(s, object) = static_cast<Cell>(word(s, object) + a.count);
        if (word(s, object) != a.value) pc(s, p) = static_cast<Cell>(at + 1 + a.skip);
        return true;
      case Op::role:
        if (word(s, object) > 30 || !(a.value >> word(s, object) & 1)) pc(s, p) = static_cast<Cell>(at + 1 + a.skip);
        word(s, object) = static_cast<Cell>(word(s, object) + 1);
        return true;
      case Op::jump:
        pc(s, p) = static_cast<Cell>(at + 1 + a.skip);
        return true;
      case Op::write:
        cell(s, object) = mode(s, p) & (kTainted | kPoisoned) ? kGarbage : static_cast<Cell>(a.value);
        return true;
      case Op::read:
        if (is_tainted || cell(s, object) == a.value) return true;
        if (cell(s, object) == kGarbage) {
          mode(s, p) = static_cast<Cell>(mode(s, p) | kPoisoned);
          return true;
        }
        failure_ = name_of(a) + " reads " + m_.cells[object] + " and finds " + version(cell(s, object)) +
                   " instead of " + version(static_cast<Cell>(a.value));
        return false;
      case Op::draw:
        if (is_aborted(s, process.rank) && !is_tainted) {
          pc(s, p) = static_cast<Cell>(process.exit[static_cast<std::size_t>(at)]);
          mode(s, p) = 0;
        }
        return true;
      case Op::finish:
        if (!(mode(s, p) & kPoisoned) || has_failed(s, process.rank)) return true;
        failure_ = name_of(a) + " returns an output made of what was written after a false wait on another rank";
        return false;
      case Op::reset:
        for (const auto& [w, value] : m_.reset_words) word(s, static_cast<std::size_t>(w)) = static_cast<Cell>(value);
        aborts(s) = 0;
        s[size_ - 1] = 0;
        return true;
      case Op::start:
        return true;
    }
    return true;
  }
  void give_up(State& s, std::size_t p) const {
    const int at = pc(s, p);
    fail(s, p);
    pc(s, p) = static_cast<Cell>(m_.is_careless ? at + 1 : m_.processes[p].exit[static_cast<std::size_t>(at)]);
    mode(s, p) = m_.is_careless ? kTainted : 0;
  }

  // Does all that can be done without choosing.
  bool settle(State& s, std::vector<Logged>* log) {
    if (!is_reduced_) return true;
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (std::size_t p = 0; p < P_; ++p)
        while (!is_done(s, p) && is_undisturbed(s, p)) {
          has_moved = true;
          if (!execute(s, {static_cast<int>(p), false}, log)) return false;
        }
    }
    return true;
  }

  // The next action of p can be done, and commutes with all that the others can do before it.
  bool is_undisturbed(const State& s, std::size_t p) {
    if (mode(s, p) & 0xff) return false;
    const Action& a = next(s, p);
    const bool can_abort = s[size_ - 1] > 0 || is_telling(s);
    const bool is_mine_aborted = is_aborted(s, m_.processes[p].rank);
    switch (a.op) {
      case Op::start:
        return is_satisfied(s, a);
      case Op::leave:
      case Op::finish:
      case Op::reset:
      case Op::jump:
        return true;
      case Op::draw:
        return is_mine_aborted || !can_abort;
      case Op::wait:
        if (is_satisfied(s, a)) return true;
        return is_mine_aborted &&
               !can_happen(s, p, [&](const Action& b) { return changes(b) && b.object == a.object; });
      case Op::wait_exact:
        if (!is_satisfied(s, a) && !is_mine_aborted) return false;
        return !can_happen(s, p, [&](const Action& b) { return changes(b) && b.object == a.object; });
      case Op::set:
      case Op::add: {
        const bool can_be_given_up = can_abort || s[size_ - 2] != 0;
        return !can_happen(s, p, [&](const Action& b) {
          return b.object == a.object && (b.op == Op::wait_exact || b.op == Op::set || b.op == Op::arrive ||
                                          (can_be_given_up && b.op == Op::wait));
        });
      }
      case Op::arrive:
      case Op::role:
        return !can_happen(s, p,
                           [&](const Action& b) { return b.object == a.object && (changes(b) || is_wait(b.op)); });
      case Op::read:
        return !can_happen(s, p, [&](const Action& b) { return b.op == Op::write && b.object == a.object; });
      case Op::write:
        return !can_happen(
            s, p, [&](const Action& b) { return (b.op == Op::write || b.op == Op::read) && b.object == a.object; });
    }
    return false;
  }
  static int added(const Action& a) { return a.op == Op::arrive || a.op == Op::role ? a.count : a.value; }
  static bool changes(const Action& b) {
    return b.op == Op::set || b.op == Op::add || b.op == Op::arrive || b.op == Op::role;
  }
  bool is_telling(const State& s) const {
    for (std::size_t p = 0; p < P_; ++p)
      if (mode(s, p) & 0xff) return true;
    return false;
  }

  // Whether some other process can come to such an action while p stands still. Of two roles it is taken to do both, and to
  // wait in neither. A wait that is given up leads to the
  // kernel's end and on to draws that see the abort, so it adds nothing but words of launches.
  template <class F>
  bool can_happen(const State& s, std::size_t p, F&& is_asked) {
    scratch_ = s;
    State& t = scratch_;
    std::vector<int>& free_until = free_until_;
    free_until.assign(P_, 0);
    for (bool has_moved = true; has_moved;) {
      has_moved = false;
      for (std::size_t q = 0; q < P_; ++q) {
        if (q == p) continue;
        while (!is_done(t, q)) {
          const Action& b = next(t, q);
          if (b.op == Op::role) free_until[q] = end_of_roles(q, pc(t, q));
          const bool is_free = pc(t, q) < free_until[q];
          const auto object = static_cast<std::size_t>(b.object);
          if (is_asked(b)) return true;
          if ((b.op == Op::start || b.op == Op::wait) && !is_free && !is_satisfied(t, b)) break;
          // An exact wait is passed by over-estimate: its word may have gone through the value.
          if (b.op == Op::wait_exact && !is_free && word(t, object) < b.value) break;
          has_moved = true;
          pc(t, q) = static_cast<Cell>(pc(t, q) + 1);
          if (b.op == Op::set)
            word(t, object) = std::max(word(t, object), static_cast<Cell>(b.value));
          else if (b.op == Op::add || b.op == Op::leave)
            word(t, object) = static_cast<Cell>(word(t, object) + b.value);
          else if (b.op == Op::arrive || b.op == Op::role)
            word(t, object) = static_cast<Cell>(word(t, object) + b.count);
          else if (b.op == Op::jump && !is_free)
            pc(t, q) = static_cast<Cell>(pc(t, q) + b.skip);
          else if (b.op == Op::reset)
            for (const auto& [w, value] : m_.reset_words)
              word(t, static_cast<std::size_t>(w)) = static_cast<Cell>(value);
        }
      }
    }
    return false;
  }

  // The end of what the two roles do that an action chooses from.
  int end_of_roles(std::size_t q, int at) const {
    const std::vector<Action>& actions = m_.processes[q].actions;
    const int jump = at + actions[static_cast<std::size_t>(at)].skip;
    return jump + 1 + actions[static_cast<std::size_t>(jump)].skip;
  }

  // ---- what is told ----

  static std::string version(Cell value) {
    if (value == 0) return "nothing";
    if (value == kGarbage) return "what was made after a false wait";
    const int call = (value - 1) / kVersionsOfCall, block = (value - 1) % kVersionsOfCall;
    const std::string text = "what call " + std::to_string(call) + " wrote";
    if (block == kWholeVersion) return text;
    if (block >= kQuantizedVersion)
      return text + " for row block " + std::to_string(block - kQuantizedVersion) + ", quantized";
    return text + (block < kCarryVersion ? " for row block " + std::to_string(block)
                                         : " in macrobatch " + std::to_string(block - kCarryVersion));
  }
  std::string name_of(const Action& a) const {
    const TaskName& task = m_.tasks[static_cast<std::size_t>(a.task)];
    return "rank " + std::to_string(task.rank) + ", call " + std::to_string(task.call) + ", " + task.text;
  }
  std::string waits_of(const State& s) const {
    std::string text;
    int num = 0;
    for (std::size_t p = 0; p < P_; ++p) {
      if (is_done(s, p) || !is_wait(next(s, p).op)) continue;
      const Action& a = next(s, p);
      const auto object = static_cast<std::size_t>(a.object);
      if (++num > 4) continue;
      text += (text.empty() ? "" : "; ") + name_of(a) + " waits for " + m_.words[object] + ", has " +
              std::to_string(word(s, object)) + " and wants " + std::to_string(a.value);
    }
    return num > 4 ? text + "; and " + std::to_string(num - 4) + " more" : text;
  }

  Verdict violated(int id, const std::vector<Step>& last) {
    verdict_.is_ok = false;
    verdict_.violation = failure_;
    std::vector<Step> steps;
    for (int at = id; at > 0; at = parents_[static_cast<std::size_t>(at)].id)
      steps.push_back(parents_[static_cast<std::size_t>(at)].step);
    std::reverse(steps.begin(), steps.end());
    steps.insert(steps.end(), last.begin(), last.end());
    std::vector<Logged> log;
    State s = initial_;
    const long long num_steps = verdict_.num_steps;
    bool is_fine = settle(s, &log);
    for (const Step& step : steps) is_fine = is_fine && execute(s, step, &log) && settle(s, &log);
    verdict_.num_steps = num_steps;
    tell(log, s);
    return verdict_;
  }

  // Keeps what the end depends on: in each process what came before, for a wait the signals that made it up, for the
  // last read whoever wrote the cell. Of a deadlock, only what those that wait have done last.
  void tell(const std::vector<Logged>& log, const State& end) {
    std::vector<bool> is_kept(log.size(), false);
    std::vector<std::size_t> todo;
    const auto keep = [&](std::size_t i) {
      if (is_kept[i]) return;
      is_kept[i] = true;
      todo.push_back(i);
    };
    const auto action = [&](std::size_t i) -> const Action& {
      return m_.processes[static_cast<std::size_t>(log[i].process)].actions[static_cast<std::size_t>(log[i].pc)];
    };
    const bool is_read = !log.empty() && !is_stuck_;
    if (is_read) {
      keep(log.size() - 1);
    } else {
      for (std::size_t i = 0; i < log.size(); ++i)
        if (log[i].is_expiry) keep(i);
      for (std::size_t p = 0; p < P_; ++p) {
        if (is_done(end, p) || !is_wait(next(end, p).op)) continue;
        for (std::size_t i = log.size(); i-- > 0;)
          if (log[i].process == static_cast<int>(p)) {
            keep(i);
            break;
          }
      }
    }
    while (!todo.empty()) {
      const std::size_t i = todo.back();
      todo.pop_back();
      for (std::size_t j = i; j-- > 0;)
        if (log[j].process == log[i].process) {
          if (is_read) keep(j);
          break;
        }
      const Action& a = action(i);
      if (is_read && a.op == Op::read)  // whoever wrote what it finds
        for (std::size_t j = i; j-- > 0;)
          if (action(j).op == Op::write && action(j).object == a.object) {
            keep(j);
            break;
          }
      if (!is_read || log[i].is_given_up || !(is_wait(a.op) || a.op == Op::start)) continue;
      Cell have = static_cast<Cell>(m_.initial_words[static_cast<std::size_t>(a.object)]);
      for (std::size_t j = 0; j < i && have < a.value; ++j) {
        const Action& b = action(j);
        if (b.object != a.object || !(changes(b) || b.op == Op::leave)) continue;
        have = b.op == Op::set ? static_cast<Cell>(b.value) : static_cast<Cell>(log[j].value + added(b));
        keep(j);
      }
    }
    for (std::size_t i = 0; i < log.size(); ++i) {
      const Action& a = action(i);
      const bool is_dull = a.op == Op::start || a.op == Op::leave || a.op == Op::draw || a.op == Op::jump;
      if (!is_kept[i] || (is_dull && !log[i].telling)) continue;
      const TaskName& task = m_.tasks[static_cast<std::size_t>(a.task)];
      verdict_.story.push_back(Event{task.rank, task.call, task.text, text_of(a, log[i])});
    }
    for (std::size_t p = 0; p < P_ && is_stuck_; ++p) {
      if (is_done(end, p) || !is_wait(next(end, p).op)) continue;
      const Action& a = next(end, p);
      const auto object = static_cast<std::size_t>(a.object);
      const TaskName& task = m_.tasks[static_cast<std::size_t>(a.task)];
      verdict_.story.push_back(Event{task.rank, task.call, task.text,
                                     "waits for " + m_.words[object] + ", which is " +
                                         std::to_string(word(end, object)) + ", to be " + std::to_string(a.value)});
    }
  }
  std::string text_of(const Action& a, const Logged& logged) const {
    const auto object = static_cast<std::size_t>(a.object);
    const std::string value = std::to_string(a.value);
    if (logged.is_expiry) return "its wait for " + m_.words[object] + " expires";
    if (logged.telling) return "tells rank " + std::to_string(logged.telling - 1) + " that the call is aborted";
    if (logged.is_given_up) return "gives up its wait for " + m_.words[object];
    switch (a.op) {
      case Op::wait:
      case Op::wait_exact:
        return "has waited for " + m_.words[object] + " to be " + value;
      case Op::set:
        return "sets " + m_.words[object] + " to " + value;
      case Op::add:
      case Op::arrive:
        return "adds to " + m_.words[object] + ", now " + std::to_string(logged.value + added(a));
      case Op::role:
        return "comes to the kernel, after " + std::to_string(logged.value) + " others";
      case Op::read:
        return "reads " + m_.cells[object] + ": " + version(logged.value);
      case Op::write:
        return "writes " + m_.cells[object] + (logged.value ? ", over " + version(logged.value) : "");
      case Op::reset:
        return "the workspace is reset";
      case Op::finish:
        return "has its output, and the call returns";
      default:
        return "";
    }
  }

  Hash hash(const State& s) const {
    std::uint64_t a = 0x9e3779b97f4a7c15u, b = 0xc2b2ae3d27d4eb4fu;
    for (const Cell value : s) {
      a = (a ^ value) * 0xff51afd7ed558ccdu;
      a ^= a >> 32;
      b = (b + value) * 0xc4ceb9fe1a85ec53u;
      b ^= b >> 29;
    }
    return Hash{a, b};
  }

  const Model& m_;
  const std::size_t P_, W_, size_;
  const bool is_reduced_;
  State initial_, scratch_;
  std::vector<int> free_until_;
  std::vector<Parent> parents_;
  std::unordered_set<Hash, HashOfHash> visited_;
  std::string failure_;
  bool is_stuck_ = false;
  Verdict verdict_;
};

}  // namespace

Verdict search(const Model& model, bool is_expiry_allowed, bool is_reduced, long long max_states) {
  return Search(model, is_expiry_allowed, is_reduced).run(max_states);
}

}  // namespace mok_explore
