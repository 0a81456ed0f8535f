// Combines elements with those of a result whose positions along one axis are
// numbers that a run knows: scatter_add, index_add, the gradients of gathers.
//
// The tensors are seen as [outer, axis, inner]. Each thread has its own part of
// outer and inner, so it alone writes to an element of the result, in the order
// of the axis.
#include <algorithm>
#include <limits>

#include "base/numbers.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

enum class Function : int8_t { kSum, kProduct, kMean, kMax, kMin };

Function function_of(const std::string& name) {
  if (name == "sum") return Function::kSum;
  if (name == "prod") return Function::kProduct;
  if (name == "mean") return Function::kMean;
  return name == "amax" ? Function::kMax : Function::kMin;
}

template <Function kFunction>
[[nodiscard]] float combine(float a, float b) {
  if constexpr (kFunction == Function::kProduct) return a * b;
  if constexpr (kFunction == Function::kMax) return a > b || a != a ? a : b;
  if constexpr (kFunction == Function::kMin) return a < b || a != a ? a : b;
  return a + b;
}

// The result of combining no elements.
[[nodiscard]] float neutral(Function function) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (function == Function::kProduct) return 1.0f;
  if (function == Function::kMax) return -kInfinity;
  return function == Function::kMin ? kInfinity : 0.0f;
}

// Offsets in the three tensors.
struct Offsets {
  int64_t index = 0;
  int64_t source = 0;
  int64_t out = 0;
};

// The offsets of all positions of some axes, in row-major order.
std::vector<Offsets> offsets_of(const Shape& sizes, size_t begin, size_t end,
                                const Strides& index, const Strides& source,
                                const Strides& out) {
  std::vector<Offsets> offsets{{}};
  for (size_t axis = begin; axis < end; ++axis) {
    std::vector<Offsets> next;
    next.reserve(offsets.size() * static_cast<size_t>(sizes[axis]));
    for (const Offsets& at : offsets) {
      for (int64_t i = 0; i < sizes[axis]; ++i) {
        next.push_back({at.index + i * index[axis],
                        at.source + i * source[axis], at.out + i * out[axis]});
      }
    }
    offsets = std::move(next);
  }
  return offsets;
}

class ScatterReduce final : public Kernel {
 public:
  explicit ScatterReduce(const OpView& op)
      : function_(function_of(op.attribute<std::string>("function"))),
        include_self_(op.attribute<bool>("include_self")),
        wraps_(op.attribute<bool>("wraps")),
        axis_(op.attribute<int64_t>("axis")),
        length_(op.output(0).shape[static_cast<size_t>(axis_)]),
        x_(op.input(0).dtype, op.input(0).shape, op.input(0).strides),
        x_id_(op.input_id(0)),
        index_id_(op.input_id(1)),
        is_32_bit_(op.input(1).dtype == DType::kInt32),
        source_(as_view(op), all_axes(op), true, workspace_),
        out_(op.output_id(0), op.output(0), workspace_),
        numel_(op.output(0).numel()),
        whole_(threads::elements(numel_), numel_) {
    const Shape& sizes = op.input(1).shape;
    const Strides& index = op.input(1).strides;
    const Strides out = contiguous_strides(op.output(0).shape);
    const auto axis = static_cast<size_t>(axis_);
    outer_ = offsets_of(sizes, 0, axis, index, source_.strides(), out);
    inner_ = offsets_of(sizes, axis + 1, sizes.size(), index, source_.strides(),
                        out);
    count_ = sizes[axis];
    step_ = {index[axis], source_.strides()[axis], out[axis]};
    blocks_ = ceil_div(std::ssize(inner_), kBlock);
    shares_ = threads::Shares(threads::elements(2 * op.input(1).numel()),
                              std::ssize(outer_) * blocks_);
    if (!op.input(1).numel()) count_ = 0;
    find_rows();
    if (function_ == Function::kMean) {
      counts_.resize(static_cast<size_t>(numel_));
    }
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* source = source_.load(context, workspace);
    float* out = out_.buffer(context, workspace);
    whole_.run([&](int64_t /*share*/, threads::Range range) {
      x_.read(context.data(x_id_), range.begin, range.size(),
              out + range.begin);
      if (function_ == Function::kMean) {
        std::fill(counts_.begin() + range.begin, counts_.begin() + range.end,
                  include_self_ ? 1 : 0);
      }
    });
    if (is_32_bit_) {
      combine_all(context.data<const int32_t>(index_id_), source, out);
    } else {
      combine_all(context.data<const int64_t>(index_id_), source, out);
    }
    if (function_ == Function::kMean) divide(out);
    out_.store(context, workspace);
  }

 private:
  static constexpr int64_t kBlock = 16;  // inner positions of a unit of work

  static FloatView as_view(const OpView& op) {
    const graph::Tensor& source = op.input(2);
    return {op.input_id(2), source.dtype, source.shape, source.strides};
  }
  static std::vector<size_t> all_axes(const OpView& op) {
    std::vector<size_t> axes(op.input(2).shape.size());
    for (size_t i = 0; i < axes.size(); ++i) axes[i] = i;
    return axes;
  }

  // Whether the inner positions are rows in memory, with one number for a row.
  void find_rows() {
    is_rows_ = std::ssize(inner_) > 1;
    for (int64_t i = 0; i < std::ssize(inner_); ++i) {
      const Offsets& at = inner_[static_cast<size_t>(i)];
      is_rows_ = is_rows_ && at.index == 0 && at.source == i && at.out == i;
    }
  }

  template <typename Index>
  void combine_all(const Index* index, const float* source, float* out) {
    shares_.run([&](int64_t /*share*/, threads::Range units) {
      for (int64_t unit = units.begin; unit < units.end;) {
        const int64_t first = unit % blocks_;
        const int64_t blocks = std::min(units.end - unit, blocks_ - first);
        const threads::Range inner{
            first * kBlock,
            std::min((first + blocks) * kBlock, std::ssize(inner_))};
        const Offsets& at = outer_[static_cast<size_t>(unit / blocks_)];
        combine_part(index + at.index, source + at.source, at.out, inner, out);
        unit += blocks;
      }
    });
  }

  template <typename Index>
  void combine_part(const Index* index, const float* source, int64_t start,
                    threads::Range inner, float* out) {
    if (!include_self_) {
      const float none = neutral(function_);
      visit(index, source, start, inner,
            [&](int64_t to, float /*value*/) { out[to] = none; });
    }
    const auto by = [&]<Function kFunction>() {
      if (is_rows_ && kFunction == Function::kSum) {
        add_rows(index, source, inner, out + start);
        return;
      }
      int64_t* counts = counts_.data();
      visit(index, source, start, inner, [=](int64_t to, float value) {
        out[to] = combine<kFunction>(out[to], value);
        if (kFunction == Function::kMean) ++counts[to];
      });
    };
    switch (function_) {
      case Function::kSum:
        return by.template operator()<Function::kSum>();
      case Function::kProduct:
        return by.template operator()<Function::kProduct>();
      case Function::kMean:
        return by.template operator()<Function::kMean>();
      case Function::kMax:
        return by.template operator()<Function::kMax>();
      case Function::kMin:
        return by.template operator()<Function::kMin>();
    }
  }

  // Calls body(place in the result, value) for all elements of a part.
  template <typename Index, typename Body>
  void visit(const Index* index, const float* source, int64_t start,
             threads::Range inner, const Body& body) const {
    const Offsets step = step_;
    const int64_t count = count_;
    if (inner_.size() == 1) {  // the elements of the axis follow each other
      for (int64_t a = 0; a < count; ++a) {
        const int64_t position = checked(index[a * step.index]);
        body(start + position * step.out, source[a * step.source]);
      }
      return;
    }
    const Offsets* offsets = inner_.data();
    for (int64_t a = 0; a < count; ++a) {
      const Index* numbers = index + a * step.index;
      const float* values = source + a * step.source;
      for (int64_t i = inner.begin; i < inner.end; ++i) {
        const Offsets& at = offsets[i];
        const int64_t position = checked(numbers[at.index]);
        body(start + position * step.out + at.out, values[at.source]);
      }
    }
  }

  template <typename Index>
  void add_rows(const Index* index, const float* source, threads::Range inner,
                float* out) const {
    for (int64_t a = 0; a < count_; ++a) {
      const float* row = source + a * step_.source + inner.begin;
      float* sum =
          out + checked(index[a * step_.index]) * step_.out + inner.begin;
      for_each_vector(inner.size(), [&](int64_t i, auto n) {
        store(load(sum + i, n) + load(row + i, n), sum + i, n);
      });
    }
  }

  [[nodiscard]] int64_t checked(int64_t position) const {
    const int64_t place =
        wraps_ && position < 0 ? position + length_ : position;
    // Negative numbers are large ones without a sign.
    if (static_cast<uint64_t>(place) >= static_cast<uint64_t>(length_))
        [[unlikely]] {
      refuse(position);
    }
    return place;
  }

  [[noreturn]] void refuse(int64_t position) const {
    throw UserError(join("index ", position, " is out of bounds for dimension ",
                         axis_, " with size ", length_));
  }

  void divide(float* out) const {
    whole_.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        out[i] /= static_cast<float>(
            std::max<int64_t>(counts_[static_cast<size_t>(i)], 1));
      }
    });
  }

  Function function_;
  bool include_self_;
  bool wraps_;  // negative positions count from the end
  int64_t axis_;
  int64_t length_;  // of the axis of the result
  Workspace workspace_;
  FloatGather x_;
  graph::TensorId x_id_;
  graph::TensorId index_id_;
  bool is_32_bit_;
  FloatInput source_;
  FloatOutput out_;
  int64_t numel_;
  threads::Shares whole_;  // of the result
  std::vector<Offsets> outer_;
  std::vector<Offsets> inner_;
  int64_t count_;  // of positions along the axis
  Offsets step_;   // along the axis
  int64_t blocks_;
  bool is_rows_ = false;
  threads::Shares shares_;
  std::vector<int64_t> counts_;  // by element of the result: those in its mean
};

std::vector<TensorType> scatter_reduce_type(const OpCall& op) {
  const Shape& x = op.input(0).shape;
  const Shape& index = op.input(1).shape;
  const Shape& source = op.input(2).shape;
  const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
  op.require(axis < x.size(), "input 0 has an axis ", axis);
  op.require(index.size() == x.size() && source.size() == x.size(),
             "the inputs have the same number of axes");
  op.require(op.input(0).dtype == op.input(2).dtype,
             "inputs 0 and 2 have the same dtype");
  for (size_t i = 0; i < x.size(); ++i) {
    op.require(index[i] <= source[i] && (i == axis || index[i] <= x[i]),
               "no axis of input 1 is longer than that of the others: axis ",
               i);
  }
  return {op.input_type(0)};
}

std::vector<graph::Work> scatter_reduce_work(const OpView& op) {
  return {graph::Elementwise{op.input(1).numel(), 2}};
}

}  // namespace

extern const OpDef kScatterReduce{
    .name = "scatter_reduce",
    .schema =
        "scatter_reduce(Tensor{floats} x, Tensor{indices} index, "
        "Tensor{floats} source, *, int{0..} axis, "
        "str{sum, prod, mean, amax, amin} function, bool include_self=True, "
        "bool wraps=False) -> Tensor",
    .family = "scatter",
    .shape = scatter_reduce_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<ScatterReduce>(op);
    },
    .work = scatter_reduce_work,
    .only_overflows = true,
};

}  // namespace popsim::ops
