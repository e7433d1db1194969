#include "targets/host/kernels.h"

#include "targets/driver.h"

namespace mok::kernels {

#define MOK_DECLARE(name) void name(const Args& args, const Launch& launch, mok::host::Worker& worker);
#define MOK_PLAIN_STAGES(DO) \
  DO(schedule)               \
  DO(publish)                \
  DO(shared_gate_up)         \
  DO(shared_down)            \
  DO(shared_down_dgrad)      \
  DO(shared_gate_up_dgrad)   \
  DO(shared_wgrad)           \
  DO(reduce)
#define MOK_WINDOWED_STAGES(DO) \
  DO(dispatch)                  \
  DO(gate_up)                   \
  DO(swiglu)                    \
  DO(down)                      \
  DO(combine)                   \
  DO(reverse_combine)           \
  DO(down_dgrad)                \
  DO(swiglu_backward)           \
  DO(gate_up_dgrad)             \
  DO(reverse_dispatch)          \
  DO(quantize)                  \
  DO(wgrad)
MOK_PLAIN_STAGES(MOK_DECLARE)
MOK_WINDOWED_STAGES(MOK_DECLARE)
template <Group kGroup>
MOK_DECLARE(persistent)

}  // namespace mok::kernels

namespace mok::host {
namespace {

struct Entry {
  Group group;  // 0: by stage
  Stage stage;
  Kernel kernel;
};

#define MOK_PLAIN(name) Entry{0, Stage::name, kernels::name},
#define MOK_WINDOWED(name) Entry{group_bit(Stage::name), Stage::name, kernels::name},
#define MOK_GROUP(first, last) \
  Entry{group_of(Stage::first, Stage::last), Stage::first, kernels::persistent<group_of(Stage::first, Stage::last)>},
constexpr Entry kEntries[] = {
    MOK_PLAIN_STAGES(MOK_PLAIN) MOK_WINDOWED_STAGES(MOK_WINDOWED) MOK_GROUP(dispatch, gate_up)
        MOK_GROUP(dispatch, swiglu) MOK_GROUP(dispatch, down) MOK_GROUP(dispatch, combine) MOK_GROUP(gate_up, swiglu)
            MOK_GROUP(gate_up, down) MOK_GROUP(gate_up, combine) MOK_GROUP(swiglu, down) MOK_GROUP(swiglu, combine)
                MOK_GROUP(down, combine) MOK_GROUP(reverse_combine, down_dgrad)
                    MOK_GROUP(reverse_combine, swiglu_backward) MOK_GROUP(reverse_combine, gate_up_dgrad)
                        MOK_GROUP(down_dgrad, swiglu_backward) MOK_GROUP(down_dgrad, gate_up_dgrad)
                            MOK_GROUP(down_dgrad, reverse_dispatch) MOK_GROUP(swiglu_backward, gate_up_dgrad)
                                MOK_GROUP(swiglu_backward, reverse_dispatch) MOK_GROUP(gate_up_dgrad, reverse_dispatch)
                                    Entry{kWholeBackward, Stage::dispatch, kernels::persistent<kWholeBackward>},
};

}  // namespace

Kernel find_kernel(Group group, Stage stage) {
  for (const Entry& entry : kEntries)
    if (entry.group == group && (group != 0 || entry.stage == stage)) return entry.kernel;
  return nullptr;
}

}  // namespace mok::host
