// Elements of some neighbouring axes at given positions: x[:, rows][:, :,
// columns] in one pass, for any dtype.
//
// The tensor is seen as [outer, axes..., inner]: `inner` elements are copied
// together.
#include <algorithm>
#include <cstring>

#include "base/numbers.h"
#include "ops/op_def.h"
#include "ops/operands/indices.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

class TakeGrid final : public Kernel {
 public:
  explicit TakeGrid(const OpView& op)
      : x_(op.input_id(0)),
        out_(op.output_id(0)),
        axis_(op.attribute<int64_t>("axis")),
        wraps_(op.attribute<bool>("wraps")) {
    const Shape& shape = op.input(0).shape;
    const auto axis = static_cast<size_t>(axis_);
    for (size_t i = 1; i < op.num_inputs(); ++i) {
      positions_.emplace_back(op, i);
      lengths_.push_back(shape[axis + i - 1]);
      counts_.push_back(op.input(i).numel());
    }
    const auto end =
        shape.begin() + static_cast<ptrdiff_t>(axis + positions_.size());
    const int64_t bytes = size_in_bytes(op.input(0).dtype);
    const int64_t inner = num_elements({end, shape.end()});
    element_bytes_ = inner == 1 ? bytes : 0;
    bytes_ = inner * bytes;
    offsets_.resize(positions_.size());
    const int64_t elements = op.output(0).numel();
    num_rows_ = elements == 0 ? 0 : elements / (inner * counts_.back());
    shares_ = threads::Shares(threads::elements(2 * elements), num_rows_);
  }

  void run(const RunContext& context) override {
    if (num_rows_ == 0) return;
    read_positions(context);
    const char* x = context.data<const char>(x_);
    char* out = context.data<char>(out_);
    const int64_t row_bytes = counts_.back() * bytes_;
    shares_.run([&](int64_t /*share*/, threads::Range rows) {
      int64_t before = -1;
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const int64_t source = source_of(row);
        char* to = out + row * row_bytes;
        if (source == before) {
          std::memcpy(to, to - row_bytes, static_cast<size_t>(row_bytes));
        } else {
          copy_row(x + source, to);
        }
        before = source;
      }
    });
  }

 private:
  // Throws UserError if a position is out of range.
  void read_positions(const RunContext& context) {
    int64_t step = bytes_;
    for (size_t i = positions_.size(); i-- > 0; step *= lengths_[i]) {
      offsets_[i] = positions_[i].read(context);
      for (int64_t& position : offsets_[i]) {
        const int64_t place =
            wraps_ && position < 0 ? position + lengths_[i] : position;
        check_user(place >= 0 && place < lengths_[i], "index ", position,
                   " is out of bounds for dimension ",
                   axis_ + static_cast<int64_t>(i), " with size ", lengths_[i]);
        position = place * step;
      }
    }
    plane_bytes_ = step;
  }

  // The bytes from the start of the tensor to the row of the input that a row
  // of the result comes from.
  [[nodiscard]] int64_t source_of(int64_t row) const {
    int64_t offset = 0;
    for (size_t i = offsets_.size() - 1; i-- > 0; row /= counts_[i]) {
      offset += offsets_[i][static_cast<size_t>(row % counts_[i])];
    }
    return row * plane_bytes_ + offset;
  }

  void copy_row(const char* from, char* to) const {
    switch (element_bytes_) {
      case 1:
        return copy_elements<uint8_t>(from, to);
      case 2:
        return copy_elements<uint16_t>(from, to);
      case 4:
        return copy_elements<uint32_t>(from, to);
      case 8:
        return copy_elements<uint64_t>(from, to);
      default:
        for (const int64_t offset : offsets_.back()) {
          std::memcpy(to, from + offset, static_cast<size_t>(bytes_));
          to += bytes_;
        }
    }
  }

  template <typename T>
  void copy_elements(const char* from, char* to) const {
    const int64_t* offsets = offsets_.back().data();
    auto* out = reinterpret_cast<T*>(to);
    for (int64_t i = 0; i < counts_.back(); ++i) {
      out[i] = *reinterpret_cast<const T*>(from + offsets[i]);
    }
  }

  graph::TensorId x_;
  graph::TensorId out_;
  int64_t axis_;                       // the first one
  bool wraps_;                         // negative positions count from the end
  std::vector<IndexInput> positions_;  // by axis
  std::vector<int64_t> lengths_;       // of the axes
  std::vector<int64_t> counts_;        // of positions
  std::vector<std::vector<int64_t>> offsets_;  // of the positions, in bytes
  int64_t bytes_;                              // that are copied together
  int64_t element_bytes_ = 0;  // 0: several elements are copied together
  int64_t plane_bytes_ = 0;    // of all these axes
  int64_t num_rows_;           // all positions but those of the last axis
  threads::Shares shares_;
};

std::vector<TensorType> take_grid_type(const OpCall& op) {
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  const Shape& x = op.input(0).shape;
  op.require_contiguous(0);
  op.require(op.num_inputs() > 1 && axis + op.num_inputs() - 1 <= x.size(),
             "input 0 has an axis for each tensor of positions, from axis ",
             axis);
  Shape shape(x.begin(), x.begin() + static_cast<ptrdiff_t>(axis));
  for (size_t i = 1; i < op.num_inputs(); ++i) {
    const Shape& positions = op.input(i).shape;
    op.require(op.num_inputs() == 2 || positions.size() == 1,
               "several tensors of positions have one axis each");
    shape.insert(shape.end(), positions.begin(), positions.end());
  }
  shape.insert(shape.end(),
               x.begin() + static_cast<ptrdiff_t>(axis + op.num_inputs() - 1),
               x.end());
  return {{op.input(0).dtype, shape}};
}

// Counts only the elements that are read.
std::vector<graph::Work> take_grid_work(const OpView& op) {
  int64_t bytes = 2 * op.output(0).bytes();
  for (size_t i = 1; i < op.num_inputs(); ++i) bytes += op.input(i).bytes();
  return {graph::Move{bytes}};
}

}  // namespace

extern const OpDef kTakeGrid{
    .name = "take_grid",
    .schema =
        "take_grid(Tensor x, Tensor{indices}[] positions, *, int{0..} axis, "
        "bool wraps=False) -> Tensor",
    .family = "scatter",
    .shape = take_grid_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<TakeGrid>(op);
    },
    .work = take_grid_work,
    .cheap = true,
    .exact = true,
};

}  // namespace popsim::ops
