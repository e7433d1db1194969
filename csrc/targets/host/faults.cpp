#include "targets/host/faults.h"

#include <stdexcept>

namespace mok::host {

Fault::Kind fault_kind_by_name(const std::string& name) {
  constexpr const char* kNames[] = {"drop", "delay", "duplicate", "corrupt", "stop", "stall"};
  for (int i = 0; i < 6; ++i)
    if (name == kNames[i]) return static_cast<Fault::Kind>(i);
  throw std::invalid_argument("no fault has the name '" + name + "'");
}

Faults::Publish Faults::at_publish(Edge edge, int rank, long long index, int dst_rank) {
  Publish publish;
  for (std::size_t i = 0; i < faults_.size(); ++i) {
    const Fault& fault = faults_[i];
    if (fault.edge != edge || fault.rank != rank || (fault.index >= 0 && fault.index != index) ||
        (fault.dst_rank >= 0 && fault.dst_rank != dst_rank))
      continue;
    switch (fault.kind) {
      case Fault::Kind::drop:
        publish.is_lost = true;
        break;
      case Fault::Kind::delay:
        publish.delay += fault.amount;
        break;
      case Fault::Kind::duplicate:
        publish.surplus += 1;
        break;
      case Fault::Kind::corrupt:
        if (hits_[i].fetch_add(1) == 0) publish.surplus += static_cast<long long>(fault.amount);
        break;
      default:
        break;
    }
  }
  return publish;
}

bool Faults::is_stopped(int rank) {
  for (std::size_t i = 0; i < faults_.size(); ++i)
    if (faults_[i].kind == Fault::Kind::stop && faults_[i].rank == rank && hits_[i].fetch_add(1) >= faults_[i].after)
      return true;
  return false;
}

const Fault* Faults::stall(const Task& task, int rank) const {
  for (const Fault& fault : faults_)
    if (fault.kind == Fault::Kind::stall && fault.rank == rank && fault.stage == task.stage &&
        (fault.index < 0 || fault.index == task.block))
      return &fault;
  return nullptr;
}

}  // namespace mok::host
