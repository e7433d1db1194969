// Word operations of the host target. Under real threads they order the plain accesses around
// them exactly as the device versions do: writers release, readers acquire after the poll.
#pragma once

#include <atomic>
#include <cstdint>

namespace mok {

using Word = unsigned long long;

inline Word load_relaxed(const Word* word) {
  return std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_relaxed);
}
// Acquire for every relaxed load that this worker made before.
inline void fence_acquire(const Word* word, bool /*is_cross_rank*/) {
  // A second, acquiring load of the same word instead of a fence: ThreadSanitizer understands it.
  (void)std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_acquire);
}
// Returns the value before the addition. Not inlined: GCC 12.2 at -O3 compiled fetch_add(n) + n to twice
// the old value in one of its callers (seen as a signal of push dispatch that never came).
[[gnu::noinline]] inline Word add_release(Word* word, Word value) {
  return std::atomic_ref<Word>(*word).fetch_add(value, std::memory_order_acq_rel);
}
// Visible to every rank; what this worker wrote or acquired before the fence is visible with it.
inline void fence_system() {}  // the store below releases
inline void store_system(Word* word, Word value) {
  std::atomic_ref<Word>(*word).store(value, std::memory_order_release);
}
// Sets a word of another rank; `own` is the same word of this rank's memory.
inline void store_signal(Word* at_dst, Word* /*own*/, int /*dst_rank*/, Word value) { store_system(at_dst, value); }

}  // namespace mok
