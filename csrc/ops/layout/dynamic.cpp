// Reads or replaces a part of a tensor along an axis; a run determines where
// the part begins. `wraps` says whether a part that passes the end of the axis
// continues at its beginning, or is an error.
#include <vector>

#include "base/check.h"
#include "ops/layout/layout_copy.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// Every `step`-th position of an axis, `count` of them.
struct Positions {
  size_t axis = 0;
  int64_t length = 0;  // of the axis
  int64_t count = 0;
  int64_t step = 1;
  bool wraps = true;

  [[nodiscard]] int64_t reach() const { return (count - 1) * step; }
};

// Throws InternalError unless all these positions exist, each only once, and
// there is one start for them.
void require_positions(const OpCall& op, size_t start, const Positions& p) {
  op.require(op.input(start).numel() == 1, "the start has one value");
  op.require(
      p.count >= 1 && p.length >= 1 && p.count - 1 <= (p.length - 1) / p.step,
      "an axis of ", p.length, " has ", p.count, " positions, each ", p.step,
      " after the one before");
  op.require(p.wraps || p.count == 1,
             "parts that do not wrap around have one position");
}

graph::Tensor with_axis(graph::Tensor tensor, size_t axis, int64_t size,
                        int64_t step = 1) {
  tensor.shape[axis] = size;
  tensor.strides[axis] *= step;
  return tensor;
}

// The direction of a copy between a tensor and its part.
enum class Direction : int8_t { kFromWhole, kToWhole };

class PartCopy {
 public:
  PartCopy(const graph::Tensor& whole, const graph::Tensor& part,
           const Positions& positions, Direction direction)
      : positions_(positions),
        from_whole_(direction == Direction::kFromWhole),
        whole_stride_(whole.strides[positions.axis] *
                      size_in_bytes(whole.dtype)),
        part_stride_(part.strides[positions.axis] * size_in_bytes(part.dtype)),
        all_(copy(
            with_axis(whole, positions.axis, positions.count, positions.step),
            part)),
        one_(copy(with_axis(whole, positions.axis, 1),
                  with_axis(part, positions.axis, 1))) {}

  // Throws UserError if the position does not exist.
  void run(char* whole, char* part, int64_t start) const {
    const int64_t length = positions_.length;
    check_user(positions_.wraps || (start >= -length && start < length),
               "index ", start, " is out of bounds for dimension ",
               positions_.axis, " with size ", length);
    const int64_t first = (start % length + length) % length;
    if (first + positions_.reach() < length) {
      return move(all_, whole + first * whole_stride_, part);
    }
    for (int64_t i = 0; i < positions_.count; ++i) {
      const int64_t position = (first + i * positions_.step) % length;
      move(one_, whole + position * whole_stride_, part + i * part_stride_);
    }
  }

 private:
  [[nodiscard]] LayoutCopy copy(const graph::Tensor& whole,
                                const graph::Tensor& part) const {
    return from_whole_ ? LayoutCopy(whole, part) : LayoutCopy(part, whole);
  }
  void move(const LayoutCopy& copy, char* whole, char* part) const {
    copy.run(from_whole_ ? whole : part, from_whole_ ? part : whole);
  }

  Positions positions_;
  bool from_whole_;
  int64_t whole_stride_;  // in bytes, along the axis
  int64_t part_stride_;
  LayoutCopy all_;
  LayoutCopy one_;  // position
};

size_t axis_of(const OpCall& op) {
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  op.require(axis < op.input(0).shape.size(), "the tensor has an axis ", axis);
  return axis;
}

// --- Read ---

Positions read_positions(const OpCall& op) {
  const size_t axis = axis_of(op);
  return {axis, op.input(0).shape[axis], op.attribute<int64_t>("count"),
          op.attribute<int64_t>("step"), op.attribute<bool>("wraps")};
}

class DynamicSlice final : public Kernel {
 public:
  explicit DynamicSlice(const OpView& op)
      : from_(op.input_id(0)),
        to_(op.output_id(0)),
        start_(op, 1),
        copy_(op.input(0), op.output(0), read_positions(op),
              Direction::kFromWhole) {}

  void run(const RunContext& context) override {
    copy_.run(context.data<char>(from_), context.data<char>(to_),
              start_.read(context).front());
  }

 private:
  graph::TensorId from_;
  graph::TensorId to_;
  IndexInput start_;
  PartCopy copy_;
};

std::vector<TensorType> slice_type(const OpCall& op) {
  const Positions positions = read_positions(op);
  require_positions(op, 1, positions);
  TensorType type = op.input_type(0);
  type.shape[positions.axis] = positions.count;
  return {type};
}

std::unique_ptr<Kernel> prepare_slice(const OpView& op) {
  return std::make_unique<DynamicSlice>(op);
}

// --- Replaced ---

constexpr size_t kPart = 1;
constexpr size_t kStart = 2;

Positions written_positions(const OpCall& op) {
  const size_t axis = axis_of(op);
  op.require_rank(kPart, op.input(0).shape.size());
  return {axis, op.input(0).shape[axis], op.input(kPart).shape[axis],
          op.attribute<int64_t>("step"), op.attribute<bool>("wraps")};
}

class DynamicUpdate final : public Kernel {
 public:
  explicit DynamicUpdate(const OpView& op)
      : from_(op.input_id(0)),
        part_(op.input_id(kPart)),
        to_(op.output_id(0)),
        start_(op, kStart),
        rest_(op.input(0), op.output(0)),
        copy_(op.output(0), op.input(kPart), written_positions(op),
              Direction::kToWhole) {}

  void run(const RunContext& context) override {
    rest_.run(context.data(from_), context.data(to_));
    copy_.run(context.data<char>(to_), context.data<char>(part_),
              start_.read(context).front());
  }

 private:
  graph::TensorId from_;
  graph::TensorId part_;
  graph::TensorId to_;
  IndexInput start_;
  LayoutCopy rest_;
  PartCopy copy_;
};

std::vector<TensorType> update_type(const OpCall& op) {
  const Positions positions = written_positions(op);
  require_positions(op, kStart, positions);
  Shape part = op.input(0).shape;
  part[positions.axis] = positions.count;
  op.require_shape(kPart, part);
  op.require(op.input(0).dtype == op.input(kPart).dtype,
             "the tensor and the part have the same dtype");
  return {op.input_type(0)};
}

std::unique_ptr<Kernel> prepare_update(const OpView& op) {
  return std::make_unique<DynamicUpdate>(op);
}

}  // namespace

extern const OpDef kDynamicSlice{
    .name = "dynamic_slice",
    .schema =
        "dynamic_slice(Tensor x, Tensor{indices} start, *, int{0..} axis, "
        "int{1..} count, int{1..} step=1, bool wraps=True) -> Tensor",
    .family = "layout",
    .shape = slice_type,
    .prepare = prepare_slice,
    .work = no_arithmetic,
    .cheap = true,
    .exact = true,
};

extern const OpDef kDynamicUpdate{
    .name = "dynamic_update",
    .schema =
        "dynamic_update(Tensor x, Tensor part, Tensor{indices} start, *, "
        "int{0..} axis, int{1..} step=1, bool wraps=True) -> Tensor",
    .family = "layout",
    .shape = update_type,
    .prepare = prepare_update,
    .work = no_arithmetic,
    .cheap = true,
    .exact = true,
};

}  // namespace popsim::ops
