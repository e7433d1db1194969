#include "targets/host/kernels.h"

#include "targets/driver.h"

namespace mok::kernels {

#define MOK_DECLARE(name) void name(const Args& args, const Launch& launch, mok::host::Worker& worker);
MOK_DECLARE(schedule)
MOK_DECLARE(publish)
MOK_DECLARE(shared_gate_up)
MOK_DECLARE(shared_down)
MOK_DECLARE(dispatch)
MOK_DECLARE(gate_up)
MOK_DECLARE(swiglu)
MOK_DECLARE(down)
MOK_DECLARE(combine)
MOK_DECLARE(reduce)
template <Group kGroup>
MOK_DECLARE(persistent)
#undef MOK_DECLARE

}  // namespace mok::kernels

namespace mok::host {

Kernel find_kernel(Group group, Stage stage) {
  switch (group) {
    case 0:
      break;
    case 0b00001:
      return kernels::dispatch;
    case 0b00010:
      return kernels::gate_up;
    case 0b00100:
      return kernels::swiglu;
    case 0b01000:
      return kernels::down;
    case 0b10000:
      return kernels::combine;
    case 0b00011:
      return kernels::persistent<0b00011>;
    case 0b00111:
      return kernels::persistent<0b00111>;
    case 0b01111:
      return kernels::persistent<0b01111>;
    case 0b11111:
      return kernels::persistent<0b11111>;
    case 0b00110:
      return kernels::persistent<0b00110>;
    case 0b01110:
      return kernels::persistent<0b01110>;
    case 0b11110:
      return kernels::persistent<0b11110>;
    case 0b01100:
      return kernels::persistent<0b01100>;
    case 0b11100:
      return kernels::persistent<0b11100>;
    case 0b11000:
      return kernels::persistent<0b11000>;
    default:
      return nullptr;
  }
  switch (stage) {
    case Stage::schedule:
      return kernels::schedule;
    case Stage::publish:
      return kernels::publish;
    case Stage::shared_gate_up:
      return kernels::shared_gate_up;
    case Stage::shared_down:
      return kernels::shared_down;
    case Stage::reduce:
      return kernels::reduce;
    default:
      return nullptr;
  }
}

}  // namespace mok::host
