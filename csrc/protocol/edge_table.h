// Who publishes an edge and who waits for it, once: the skeletons of csrc/explore/ are made from this table, and a test
// holds real runs of the stage code, all plans and both passes, against it in both directions.
// A new stage or edge is a row, or a name in a row. Only documentation and checks read it: no kernel does.
#pragma once

#include "layout.h"

namespace mok {

// A set of stages, by their numbers.
using StageSet = uint64;
constexpr StageSet stages() { return 0; }
template <class... Rest>
constexpr StageSet stages(Stage first, Rest... rest) {
  return StageSet{1} << static_cast<int>(first) | stages(rest...);
}
constexpr StageSet kEveryStage = (StageSet{1} << kNumStages) - 1;

struct EdgeRow {
  Edge edge;
  StageSet writers, readers;  // of a worker's task at hand
};

constexpr EdgeRow kEdgeTable[] = {
    // across ranks
    {Edge::entered, stages(Stage::publish, Stage::schedule), stages(Stage::dispatch)},
    {Edge::topk_ready, stages(Stage::schedule), stages(Stage::schedule)},
    {Edge::input_ready, stages(Stage::publish), stages(Stage::dispatch, Stage::reverse_combine)},
    {Edge::done, kEveryStage, stages(Stage::publish, Stage::reduce)},
    {Edge::x_arrived, stages(Stage::dispatch), stages(Stage::gate_up)},
    {Edge::y_arrived, stages(Stage::down), stages(Stage::combine)},
    // inside a rank
    {Edge::x_ready, stages(Stage::dispatch), stages(Stage::dispatch, Stage::gate_up)},
    {Edge::gate_up_ready, stages(Stage::gate_up), stages(Stage::swiglu, Stage::swiglu_backward, Stage::down_dgrad)},
    {Edge::hidden_ready, stages(Stage::gate_up, Stage::swiglu), stages(Stage::down)},
    {Edge::y_ready, stages(Stage::down), stages(Stage::combine)},
    {Edge::slot_free, stages(Stage::down, Stage::combine, Stage::gate_up_dgrad, Stage::reverse_dispatch, Stage::wgrad),
     stages(Stage::dispatch, Stage::reverse_combine)},
    {Edge::shared_hidden_ready, stages(Stage::shared_gate_up), stages(Stage::shared_down)},
    {Edge::shared_ready, stages(Stage::shared_down, Stage::shared_gate_up_dgrad), stages(Stage::reduce)},
    {Edge::d_y_ready, stages(Stage::reverse_combine), stages(Stage::down_dgrad)},
    {Edge::d_hidden_ready, stages(Stage::down_dgrad), stages(Stage::swiglu_backward)},
    {Edge::d_gate_up_ready, stages(Stage::down_dgrad, Stage::swiglu_backward),
     stages(Stage::gate_up_dgrad, Stage::quantize)},
    {Edge::d_x_ready, stages(Stage::gate_up_dgrad), stages(Stage::reverse_dispatch)},
    {Edge::segment_ready, stages(Stage::down_dgrad, Stage::swiglu_backward, Stage::quantize), stages(Stage::wgrad)},
    {Edge::carry_done, stages(Stage::wgrad), stages(Stage::wgrad)},
    {Edge::shared_d_gate_up_ready, stages(Stage::shared_down_dgrad),
     stages(Stage::shared_gate_up_dgrad, Stage::shared_wgrad)},
    {Edge::published, stages(Stage::publish), kEveryStage},
    {Edge::pushed, stages(Stage::dispatch), stages()},
    {Edge::exited, kEveryStage, stages()},
    // of a schedule
    {Edge::ids_pushed, stages(Stage::schedule), stages()},
    {Edge::ids_counted, stages(Stage::schedule), stages(Stage::schedule)},
    {Edge::laid_out, stages(Stage::schedule), stages(Stage::schedule)},
    {Edge::schedule_exited, stages(Stage::schedule), stages()},
};

constexpr bool writes(Stage stage, Edge edge) {
  for (const EdgeRow& row : kEdgeTable)
    if (row.edge == edge) return (row.writers & stages(stage)) != 0;
  return false;
}
constexpr bool waits_for(Stage stage, Edge edge) {
  for (const EdgeRow& row : kEdgeTable)
    if (row.edge == edge) return (row.readers & stages(stage)) != 0;
  return false;
}

}  // namespace mok
