// handshake: a round of signals between all pairs of ranks, before the first call of a workspace and after a reset.
//
// It is a call without tokens: every word that a rank waits for later is sent once and waited for by everybody, and
// the epochs advance. So a rank that cannot reach another is found before anything depends on it. Where ranks are
// processes only: one CTA, after the hosts have met.
#include "targets/driver.h"

namespace mok::kernels {
MOK_KERNEL(handshake) {
  if (worker.index() != 0 || !worker.is_leader()) return;
  Signals<Worker> signals(args, worker);
  constexpr Edge kEdges[] = {Edge::entered, Edge::topk_ready, Edge::input_ready, Edge::done};
  for (const Edge edge : kEdges) signals.set_all_ranks(edge);
  for (const Edge edge : kEdges)
    if (!signals.wait_all_ranks(edge)) return;
  Epochs* epochs = args.call.at<Epochs>(Region::epochs);
  epochs->call += 1;
  epochs->schedule += 1;
  epochs->order += 1;
}
}  // namespace mok::kernels
