// Waits and publishes: the only code that loops on a signal.
//
// Words across ranks have one writer and are SET to an epoch; counters inside a rank are added to
// and stand in two banks by epoch parity. A wait returns false when the call was aborted, when it
// expired, or when the awaited rank turns out to make another call. After a false wait a worker
// makes no remote write, overwrites nothing published and sends no signal for the rest of the call.
#pragma once

#include "call.h"

namespace mok {

// A call together with the epochs it runs under, read once when a kernel starts.
struct Args {
  const Call& call;
  Word call_epoch;      // of this call; of the last finished one + 1 in a schedule
  Word schedule_epoch;  // likewise
  Word order;           // of this call among calls and schedules
  Word generation;      // resets so far

  MOK_DEVICE explicit Args(const Call& a_call) : call(a_call) {
    const Epochs* epochs = call.at<Epochs>(Region::epochs);
    call_epoch = epochs->call + 1;
    schedule_epoch = epochs->schedule + 1;
    order = epochs->order + 1;
    generation = epochs->generation;
  }
  MOK_DEVICE Word epoch_of(Edge edge) const {
    return is_schedule_edge(edge) ? schedule_epoch : is_order_edge(edge) ? order : call_epoch;
  }
  MOK_DEVICE Word* counter(Edge edge, int64 index) const {
    const int32 bank = is_schedule_edge(edge) ? call.schedule_bank : call.call_bank;
    return call.at<Word>(Region::counters) + call.counter_start[static_cast<int>(edge)] +
           static_cast<int64>(epoch_of(edge) & 1) * bank + index;
  }
  MOK_DEVICE Word* word(Edge edge, Word epoch, int32 src_rank, int32 at_rank) const {
    return call.peer<Word>(Region::words, at_rank) + word_offset(edge, epoch & 1, src_rank, call.shape);
  }
  MOK_DEVICE Word* arrival(Edge edge, int64 index, int32 src_rank, int32 at_rank) const {
    const int64 plane = edge == Edge::y_arrived ? call.shape.num_ranks : 0;
    return call.peer<Word>(Region::arrivals, at_rank) + (plane + src_rank) * call.shape.capacity_blocks() + index;
  }
};

// entered: order (40 bits), call kind (8), fingerprint (16). The others hold an epoch.
constexpr int kEnteredBits = 24;
MOK_DEVICE Word entered_word(const Args& args) {
  return args.order << kEnteredBits | static_cast<Word>(args.call.kind) << 16 | (args.call.fingerprint & 0xffffu);
}

enum class WaitKind : int32 { at_least, exactly, entered };

// What a worker waits for; also a row of the table that an error shows.
struct Wait {
  const Word* word = nullptr;
  Word want = 0;
  WaitKind kind = WaitKind::at_least;
  const Word* peer_entered = nullptr;  // of the awaited rank, where there is one
  Word own_entered = 0;
  Edge edge = Edge::entered;
  int64 index = 0;
  int32 peer = -1;

  MOK_DEVICE bool is_satisfied() const {
    const Word have = load_relaxed(word);
    if (kind == WaitKind::at_least) return have >= want;
    if (kind == WaitKind::exactly) return have == want;
    return have >> kEnteredBits == want;
  }
  // The awaited rank has entered a call with this one's number, but it is another call.
  MOK_DEVICE bool is_mismatch() const {
    if (!peer_entered) return false;
    const Word have = load_relaxed(peer_entered);
    return have >> kEnteredBits == own_entered >> kEnteredBits && have != own_entered;
  }
  MOK_DEVICE bool is_over() const { return is_satisfied() || is_mismatch(); }
};

// The rank that ended the call, -1 if none did. All words are loaded before one is looked at.
MOK_DEVICE int32 abort_raiser(const Args& args) {
  const Word* words = args.call.at<Word>(Region::words) + abort_offset(0, args.call.shape);
  int32 raiser = -1;
  for (int32 src = 0; src < args.call.shape.num_ranks; ++src)
    if (load_relaxed(words + src) == args.generation + 1) raiser = src;
  return raiser;
}
MOK_DEVICE bool is_aborted(const Args& args) { return abort_raiser(args) >= 0; }
// Tells every rank. One word per raiser, and it carries the reset generation: a stale one is ignored.
MOK_DEVICE void raise_abort(const Args& args) {
  const Shape& s = args.call.shape;
  const int64 offset = abort_offset(args.call.rank, s);
  fence_system();
  for (int32 dst = 0; dst < s.num_ranks; ++dst)
    store_signal(args.call.peer<Word>(Region::words, dst) + offset, args.call.at<Word>(Region::words) + offset, dst,
                 args.generation + 1);
}

// Whether all ranks have sent what a call starts with: from then on none can delay it by being late.
MOK_DEVICE bool all_have_come(const Args& args) {
  const Edge edge = args.call.kind == CallKind::schedule ? Edge::topk_ready : Edge::input_ready;
  const Word epoch = args.epoch_of(edge);
  const Word* words = args.call.at<Word>(Region::words) + word_offset(edge, 0, 0, args.call.shape);
  for (int32 src = 0; src < args.call.shape.num_ranks; ++src)
    if (load_relaxed(words + src) < epoch) return false;
  return true;
}

// Words across ranks as a reset to these epochs leaves them: nobody waits for a call before it. `words` are zero.
MOK_DEVICE void reset_words(Word* words, const Epochs& epochs, const Shape& s) {
  for (int32 src = 0; src < s.num_ranks; ++src) {
    for (int32 parity = 0; parity < 2; ++parity) words[word_offset(Edge::done, parity, src, s)] = epochs.call;
    words[word_offset(Edge::topk_ready, 0, src, s)] = epochs.schedule;
    words[word_offset(Edge::input_ready, 0, src, s)] = epochs.call;
  }
}

// Ranks whose word a worker has seen in this call: it need not look again.
class SeenRanks {
 public:
  MOK_DEVICE bool has(int32 rank) const { return (rank < 64 ? low_ : high_) >> rank % 64 & 1; }
  MOK_DEVICE void insert(int32 rank) {
    count_ += !has(rank);
    const Word bit = Word{1} << rank % 64;
    low_ |= rank < 64 ? bit : 0;
    high_ |= rank < 64 ? 0 : bit;
  }
  MOK_DEVICE int32 count() const { return count_; }

 private:
  static_assert(kMaxRanks == 128);
  Word low_ = 0, high_ = 0;
  int32 count_ = 0;
};

// What stages see: every wait and publish by the name of its edge.
template <class Worker>
class Signals {
 public:
  MOK_DEVICE Signals(const Args& args, Worker& worker) : args_(args), worker_(worker) {}

  // Inside the rank: `want` arrivals on a counter.
  MOK_DEVICE bool wait_local(Edge edge, int64 index, Word want) {
    Wait wait;
    wait.word = args_.counter(edge, index);
    wait.want = want;
    wait.edge = edge;
    wait.index = index;
    return wait_until(wait);
  }
  // `src_rank` has SET the word of this call (or, for the publish of a call, of the one before).
  MOK_DEVICE bool wait_rank(Edge edge, int32 src_rank, Word epochs_back = 0) {
    const Word epoch = args_.epoch_of(edge) - epochs_back;
    Wait wait = wait_for_peer(edge, src_rank);
    wait.word = args_.word(edge, epoch, src_rank, args_.call.rank);
    wait.want = epoch;
    if (edge == Edge::done) wait.kind = WaitKind::exactly;  // two words by parity: a peer may be one ahead
    if (edge == Edge::entered) wait.kind = WaitKind::entered;
    return wait_until(wait);
  }
  // The same for a word of this call that many tasks need: looked at once a worker and rank.
  MOK_DEVICE bool wait_rank_once(Edge edge, int32 src_rank, SeenRanks& seen) {
    if (seen.has(src_rank)) return true;
    if (!wait_rank(edge, src_rank)) return false;
    seen.insert(src_rank);
    return true;
  }
  MOK_DEVICE SeenRanks& seen_inputs() { return worker_.seen_inputs; }
  MOK_DEVICE SeenRanks& seen_dones() { return worker_.seen_dones; }
  MOK_DEVICE bool wait_all_ranks(Edge edge, Word epochs_back = 0) {
    for (int32 src = 0; src < args_.call.shape.num_ranks; ++src)
      if (!wait_rank(edge, src, epochs_back)) return false;
    return true;
  }
  // `src_rank` has sent what it owes to this row block (or minibatch slot) here.
  MOK_DEVICE bool wait_arrival(Edge edge, int64 index, int32 src_rank) {
    Wait wait = wait_for_peer(edge, src_rank);
    wait.word = args_.arrival(edge, index, src_rank, args_.call.rank);
    wait.want = args_.call_epoch;
    wait.index = index;
    return wait_until(wait);
  }

  // Returns the count before.
  MOK_DEVICE Word add(Edge edge, int64 index, Word count = 1) {
    if (!worker_.may_publish(edge, index, args_.call.rank, count, 0)) return 0;
    return add_release(args_.counter(edge, index), count);
  }
  // Adds `count` and tells whether that made up `total`; then everything the others did before their
  // additions is visible here.
  MOK_DEVICE bool arrive(Edge edge, int64 index, Word total, Word count = 1) {
    if (!worker_.may_publish(edge, index, args_.call.rank, count, total)) return false;
    const bool is_last = add_release(args_.counter(edge, index), count) + count == total;
    if (is_last) fence_acquire(args_.counter(edge, index), false);
    return is_last;
  }
  // One system fence, then a store a rank.
  MOK_DEVICE void set_all_ranks(Edge edge) {
    const Word epoch = args_.epoch_of(edge), value = edge == Edge::entered ? entered_word(args_) : epoch;
    fence_system();
    const int32 rank = args_.call.rank;
    for (int32 dst = 0; dst < args_.call.shape.num_ranks; ++dst)
      if (worker_.may_publish(edge, dst, dst, value, 0))
        store_signal(args_.word(edge, epoch, rank, dst), args_.word(edge, epoch, rank, rank), dst, value);
  }
  MOK_DEVICE void set_arrival(Edge edge, int64 index, int32 dst_rank) {
    if (!worker_.may_publish(edge, index, dst_rank, args_.call_epoch, 0)) return;
    const int32 rank = args_.call.rank;
    fence_system();
    store_signal(args_.arrival(edge, index, rank, dst_rank), args_.arrival(edge, index, rank, rank), dst_rank,
                 args_.call_epoch);
  }

 private:
  MOK_DEVICE Wait wait_for_peer(Edge edge, int32 src_rank) const {
    Wait wait;
    wait.edge = edge;
    wait.index = src_rank;
    wait.peer = src_rank;
    wait.peer_entered = args_.word(Edge::entered, args_.order, src_rank, args_.call.rank);
    wait.own_entered = entered_word(args_);
    return wait;
  }
  // Relaxed polls, one acquire after success: an acquire in the loop would empty the L1 at every poll.
  MOK_DEVICE bool wait_until(const Wait& wait) {
    worker_.begin_wait(wait);
    bool is_running = true;
    // An abort is looked for between polls only: a wait that is over costs one load.
    while (is_running && !wait.is_over()) is_running = worker_.pause(args_, wait);
    worker_.end_wait(wait);
    if (!is_running) return false;
    if (wait.is_mismatch()) {
      worker_.fail(args_, wait);
      return false;
    }
    fence_acquire(wait.word, is_cross_rank(wait.edge));
    return true;
  }

  const Args& args_;
  Worker& worker_;
};

}  // namespace mok
