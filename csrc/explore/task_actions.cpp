#include "explore/task_actions.h"

#include <algorithm>

#include "fused/stages.h"
#include "stages/publish.h"
#include "stages/reduce.h"

namespace mok::explore {

using namespace mok_explore;

int version_of(int call_idx, int block) { return call_idx * kVersionsOfCall + block + 1; }

namespace {

// f(type of the stage), in the way that the shape says. A schedule has tasks of another kind.
template <class F>
void visit(const Shape& shape, Stage stage, F&& f) {
#define MOK_VISIT_windowed(name, Type)              \
  if (stage == Stage::name) {                       \
    (void)in_its_way(shape, Type{}, [&](auto way) { \
      f(way);                                       \
      return true;                                  \
    });                                             \
  }
#define MOK_VISIT_prologue(name, Type) MOK_VISIT_windowed(name, Type)
#define MOK_VISIT_last(name, Type) MOK_VISIT_windowed(name, Type)
#define MOK_VISIT_apart(name, Type)
#define MOK_VISIT(name, Type, file, place, ...) MOK_VISIT_##place(name, Type)
  MOK_STAGES(MOK_VISIT)
#undef MOK_VISIT
#undef MOK_VISIT_apart
#undef MOK_VISIT_last
#undef MOK_VISIT_prologue
#undef MOK_VISIT_windowed
}

// Row blocks are one cell a column tile of the product that makes them; rows that go to another rank are one cell for all
// of a row block that go there together.
class Accesses {
 public:
  Accesses(const Ranks& ranks, const Call& call, const Task& task, int call_idx, int context_of)
      : ranks_(ranks),
        call_(call),
        s_(call.shape),
        task_(task),
        block_(task.block),
        call_idx_(call_idx),
        context_of_(context_of) {}

  std::vector<Access> all;

  template <class S>
  void run(S) {}

  // ---- of both passes ----
  void run(Publish) {
    if (call_.tensors.x != call_.at<bf16>(Region::x) && (!call_.is_backward() || call_.can_replay()))
      write(call_.at<bf16>(Region::x), whole());
    if (call_.has_dgrad()) write(call_.at<bf16>(Region::d_output), whole());
  }
  void run(DispatchPull) {
    for (const int32 row : first_rows(block_)) {
      const int32 from = row_here(call_, row);
      if (from < 0) {
        read(call_.peer<bf16>(Region::x, call_.schedule.peer_rank[row]), whole());
      } else {
        const int32 block = from / s_.row_block();
        read(x_row(call_, block, 0), version(block));
      }
    }
    write(x_row(call_, block_, 0), version(block_));
  }
  void run(DispatchPush) {
    for (const auto& [route, cell] : pushed_pieces(call_.rank))
      if (route / kCopyRows == task_.part) {
        const Route& to = ranks_.routes(call_.rank)[static_cast<std::size_t>(call_.schedule.sorted_route[route])];
        write(cell, version(to.block));
      }
  }
  void run(GateUp) {
    if (s_.is_push_dispatch) {
      for (int src = 0; src < s_.num_ranks; ++src)
        for (const auto& [route, cell] : pushed_pieces(src)) {
          const Call& peer = ranks_.call(src);
          const Route& to = ranks_.routes(src)[static_cast<std::size_t>(peer.schedule.sorted_route[route])];
          if (to.owner == call_.rank && to.block == block_) read(cell, version(block_));
        }
    } else {
      read(x_row(call_, block_, 0), version(block_));
    }
    const PlaneList planes = GateUp::planes(call_, task_);
    if (planes.has(Plane::hidden)) write(hidden_row(call_, block_, 0), version(block_), task_.part);
    if (planes.has(Plane::gate)) write(gate_row(call_, block_, 0), version(block_), task_.part);
  }
  void run(SharedGateUp) { write(call_.at<bf16>(Region::shared_hidden), whole(), task_.part); }
  void run(SharedDown) { shared(Region::shared_hidden, num_shared_gate_up_tiles(s_), Region::shared_y); }
  void run(Reduce) {
    if (call_.kind != CallKind::forward && !call_.has_dgrad()) return;
    if (call_.num_tokens > 0)
      for (int tile = 0; tile < num_down_tiles(s_); ++tile) read(call_.at<bf16>(Region::shared_y), whole(), tile);
    const std::vector<Route>& routes = ranks_.routes(call_.rank);
    for (std::size_t i = 0; i < routes.size(); ++i)
      if (is_first_of_block(routes, i))
        for (int tile = 0; tile < num_down_tiles(s_); ++tile) read(route_cell(i), version(routes[i].block), tile);
  }

  // ---- forward ----
  void run(Swiglu) {
    for (int tile = 0; tile < num_gate_up_tiles(s_); ++tile) read(gate_row(call_, block_, 0), version(block_), tile);
    for (int tile = 0; tile < num_gate_up_tiles(s_); ++tile) write(hidden_row(call_, block_, 0), version(block_), tile);
  }
  void run(Down) {
    for (int tile = 0; tile < num_gate_up_tiles(s_); ++tile) read(hidden_row(call_, block_, 0), version(block_), tile);
    if (bf16* rows = Down::plane_rows(call_, task_, Plane::y))
      write(rows, version(block_), task_.part);
    else
      push_rows(task_.part);
  }
  void run(CombinePush) { send_rows(y_row(call_, block_, 0)); }
  void run(CombinePull) {
    const std::vector<Route>& routes = ranks_.routes(call_.rank);
    const auto begin = static_cast<std::size_t>(task_.part) * kCopyRows,
               end = std::min(begin + kCopyRows, routes.size());
    for (std::size_t i = begin; i < end; ++i) {
      if (!is_first_of_block(routes, i)) continue;
      const bf16* y =
          call_.peer<bf16>(Region::ring_y, routes[i].owner) + int64{routes[i].block} * s_.row_block() * s_.hidden_size;
      for (int tile = 0; tile < num_down_tiles(s_); ++tile) read(y, version(routes[i].block), tile);
      for (int tile = 0; tile < num_down_tiles(s_); ++tile) write(route_cell(i), version(routes[i].block), tile);
    }
  }

  // ---- backward ----
  void run(ReverseCombine) {
    for (const int32 row : first_rows(block_))
      read(call_.peer<bf16>(Region::d_output, call_.schedule.peer_rank[row]), whole());
    write(d_y_row(call_, block_, 0), version(block_));
  }
  void run(DownDgrad) {
    read(d_y_row(call_, block_, 0), version(block_));
    if (!DownDgrad::is_swiglu_backward_here(call_))
      return write(d_hidden_row(call_, block_, 0), version(block_), task_.part);
    constexpr int kPerTile = kDownCols / kGateUpCols;
    for (int tile = task_.part * kPerTile; tile < min_of((task_.part + 1) * kPerTile, num_gate_up_tiles(s_)); ++tile)
      swiglu_gradients(tile);
  }
  void run(SwigluBackward) {
    for (int tile = 0; tile < num_down_dgrad_tiles(s_); ++tile)
      read(d_hidden_row(call_, block_, 0), version(block_), tile);
    for (int tile = 0; tile < num_gate_up_tiles(s_); ++tile) swiglu_gradients(tile);
  }
  void run(GateUpDgrad) {
    for (int tile = 0; tile < num_gate_up_tiles(s_); ++tile) read(d_gate_row(call_, block_, 0), version(block_), tile);
    if (bf16* rows = GateUpDgrad::plane_rows(call_, task_, Plane::d_x))
      write(rows, version(block_), task_.part);
    else
      push_rows(task_.part);
  }
  void run(ReverseDispatch) { send_rows(d_x_row(call_, block_, 0)); }
  void run(Quantize) {
    for (const Op op : {Op::read, Op::write})
      for (const GradientOperand operand :
           {GradientOperand::x, GradientOperand::d_y, GradientOperand::d_gate, GradientOperand::hidden})
        operand_access(op, operand);
  }
  void run(Wgrad) {
    if (task_.num_rows == 0) return;
    const int32 macrobatch = block_macrobatch(s_, block_);
    const BlockRange blocks = expert_blocks(call_, task_.expert, macrobatch);
    const Operands operands = Wgrad::operands(call_, task_, Wgrad::decode(call_, task_), 0);
    for (int block = blocks.first; block < blocks.end; ++block)
      for (const Operand& operand : {operands.a, operands.b[0]}) read_operand(operand, block, block - blocks.first);
    const float* carry = call_.at<float>(Region::carry);
    const int32 unit = Wgrad::carry_unit(call_, task_);
    if (Wgrad::start(call_, task_)) read(carry, version(kCarryVersion + macrobatch - 1), unit);
    if (Wgrad::planes(call_, task_).has(Plane::carry)) write(carry, version(kCarryVersion + macrobatch), unit);
  }
  void run(SharedDownDgrad) { write(call_.at<bf16>(Region::shared_d_gate), whole(), task_.part); }
  void run(SharedGateUpDgrad) { shared(Region::shared_d_gate, num_shared_down_dgrad_tiles(s_), Region::shared_y); }
  void run(SharedWgrad) {
    if (task_.num_rows == 0) return;
    for (int tile = 0; tile < num_shared_down_dgrad_tiles(s_); ++tile)
      read(call_.at<bf16>(Region::shared_d_gate), whole(), tile);
  }

 private:
  void read(const void* address, int version, int tile = -1) {
    all.push_back({Op::read, name(address, tile), version});
  }
  void write(const void* address, int version, int tile = -1) {
    all.push_back({Op::write, name(address, tile), version});
  }
  std::string name(const void* address, int tile) const {
    std::int64_t offset = 0;
    std::string name = ranks_.name_of(address, &offset);
    if (offset > 0) name += " at byte " + std::to_string(offset);
    return tile < 0 ? name : name + ", tile " + std::to_string(tile);
  }

  int whole() const { return version_of(call_idx_); }
  int version(int block) const { return version_of(call_idx_, block); }
  // Of what the context holds where it holds it.
  int made(int block) const {
    return block_macrobatch(s_, block) == 0 ? version_of(context_of_, block) : version(block);
  }

  // One row of every source.
  std::vector<int32> first_rows(int block) const {
    std::vector<int32> rows;
    std::vector<bool> is_seen(static_cast<std::size_t>(s_.num_ranks), false);
    for (int32 row = block * s_.row_block(); row < (block + 1) * s_.row_block(); ++row) {
      const auto src = static_cast<std::size_t>(call_.schedule.peer_rank[row]);
      if (!is_seen[src]) rows.push_back(row);
      is_seen[src] = true;
    }
    return rows;
  }
  // Positions in a rank's sorted routes, and the cells for what goes to one row block from there in one task.
  std::vector<std::pair<int32, const bf16*>> pushed_pieces(int src) const {
    const Call& from = ranks_.call(src);
    std::vector<std::pair<int32, const bf16*>> pieces;
    Route last;
    for (int32 at = 0; at < from.schedule.counts[kCountRoutes]; ++at) {
      const Route& route = ranks_.routes(src)[static_cast<std::size_t>(from.schedule.sorted_route[at])];
      if (at % kCopyRows == 0 || route.owner != last.owner || route.block != last.block)
        pieces.emplace_back(at, from.peer<bf16>(Region::ring_x, route.owner) + int64{route.row} * s_.hidden_size);
      last = route;
    }
    return pieces;
  }
  static bool is_first_of_block(const std::vector<Route>& routes, std::size_t i) {
    if (routes[i].owner < 0) return false;
    return i == 0 || routes[i].owner != routes[i - 1].owner || routes[i].block != routes[i - 1].block;
  }
  const bf16* route_cell(std::size_t route) const {
    return call_.at<bf16>(Region::combine) + static_cast<int64>(route) * s_.hidden_size;
  }
  void push_rows(int tile) {
    for (const int32 row : first_rows(block_)) write(combine_destination(call_, row), version(block_), tile);
  }
  void send_rows(const bf16* rows) {
    for (int tile = 0; tile < num_down_tiles(s_); ++tile) read(rows, version(block_), tile);
    for (int tile = 0; tile < num_down_tiles(s_); ++tile) push_rows(tile);
  }
  void shared(Region from, int num_tiles, Region to) {
    for (int tile = 0; tile < num_tiles; ++tile) read(call_.at<bf16>(from), whole(), tile);
    write(call_.at<bf16>(to), whole(), task_.part);
  }
  void swiglu_gradients(int tile) {
    read(gate_row(call_, block_, 0), made(block_), tile);
    write(d_gate_row(call_, block_, 0), version(block_), tile);
    write(hidden_row(call_, block_, 0), version(block_), tile);
  }
  // Rows of d_up go where those of d_gate do, and so are no cells.
  int num_tiles(int64 width) const { return width == s_.hidden_size ? 1 : num_gate_up_tiles(s_); }
  void operand_access(Op op, GradientOperand operand) {
    const bool is_x = operand == GradientOperand::x;
    const bf16* rows =
        op == Op::write ? columnwise_row(call_, operand, block_, 0) : operand_row(call_, operand, block_, 0);
    const int expected = op == Op::write ? version(kQuantizedVersion + block_) : is_x ? made(block_) : version(block_);
    rows_access(op, rows, expected, operand_width(call_, operand));
  }
  void read_operand(const Operand& operand, int block, int blocks_before) {
    if (operand.matrix == Matrix::ring_d_up || operand.matrix == Matrix::ring_up) return;
    const MatrixInMemory matrix = matrix_in_memory(call_, operand.matrix);
    const bool is_x = operand.matrix == Matrix::ring_x || operand.matrix == Matrix::context_x;
    const int expected = s_.is_mxfp8() ? version(kQuantizedVersion + block) : is_x ? made(block) : version(block);
    rows_access(Op::read, matrix.base + (operand.row + blocks_before * s_.row_block()) * matrix.width, expected,
                matrix.width);
  }
  void rows_access(Op op, const bf16* rows, int version, int64 width) {
    for (int tile = 0; tile < num_tiles(width); ++tile)
      all.push_back({op, name(rows, num_tiles(width) == 1 ? -1 : tile), version});
  }

  const Ranks& ranks_;
  const Call& call_;
  const Shape& s_;
  const Task& task_;
  const int block_, call_idx_, context_of_;
};

}  // namespace

std::vector<Record> recorded_needs(const Args& args, const Task& task) {
  std::vector<Record> records;
  visit(args.call.shape, task.stage, [&](auto stage) {
    records = record(args, 1, [&](Worker& worker) {
      Signals<Worker> signals(args, worker);
      if (!stage.needs(args, task, signals)) throw std::logic_error("a recorded wait was not over");
    });
  });
  return records;
}
std::vector<Record> recorded_publishes(const Args& args, const Task& task) {
  std::vector<Record> records;
  visit(args.call.shape, task.stage, [&](auto stage) {
    records = record(args, 1, [&](Worker& worker) {
      Signals<Worker> signals(args, worker);
      stage.publishes(args, task, signals);
    });
  });
  return records;
}

std::vector<Access> accesses_of(const Ranks& ranks, const Call& call, const Task& task, int call_idx, int context_of) {
  Accesses accesses(ranks, call, task, call_idx, context_of);
  visit(call.shape, task.stage, [&](auto stage) { accesses.run(stage); });
  return std::move(accesses.all);
}

}  // namespace mok::explore
