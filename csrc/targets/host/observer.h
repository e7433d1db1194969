// Who looks at the runs of the fiber executor from inside: the happens-before checker. Nobody, as a rule.
#pragma once

#include <vector>

#include "layout.h"

namespace mok {
struct Wait;
}

namespace mok::host {

class Worker;
struct RankProgram;

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin_run(const std::vector<RankProgram>& programs) = 0;
  virtual void end_run() = 0;
  // A worker of a launch comes to be: behind all earlier launches of its stream, or of both.
  virtual void start(const Worker& worker, int stream, bool is_join) = 0;
  virtual void resume(const Worker& worker) = 0;
  virtual void leave(const Worker& worker, int stream) = 0;
  virtual void draw(const Word* counter) = 0;         // tickets promise no order
  virtual void satisfied(const mok::Wait& wait) = 0;  // the acquire that follows is for this
};
// null: nobody.
inline Observer* observer = nullptr;

}  // namespace mok::host
