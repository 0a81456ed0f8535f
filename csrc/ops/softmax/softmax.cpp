// Softmax and log-softmax over any axis, and their gradients.
//
// The tensor is seen as [outer, size, inner] with the softmax over `size`.
// Over the last axis (inner = 1) a row is a vector; otherwise a block of
// columns is worked on at a time.
#include <algorithm>
#include <cmath>

#include "base/numbers.h"
#include "ops/math/softmax_rows.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/rows.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr int64_t kColumns = 64;
struct LogSoftmax {
  static void row(const float* x, float* out, int64_t size) {
    const Vec shift(largest(x, size));
    Vec sum(0.0f);
    for_each_vector(size, [&](int64_t i, auto n) {
      sum = sum + keep(exp(load(x + i, n) - shift), Vec(0.0f), n);
    });
    const Vec log_sum(std::log(sum_across(sum)));
    for_each_vector(size, [&](int64_t i, auto n) {
      store(load(x + i, n) - shift - log_sum, out + i, n);
    });
  }

  template <typename Lanes>
  static void columns(Strip<const float> x, Strip<float> out, int64_t size,
                      const Vec& shift, Lanes n) {
    Vec sum(0.0f);
    for (int64_t i = 0; i < size; ++i) {
      sum = sum + exp(load(x.at(i), n) - shift);
    }
    const Vec log_sum = log(sum);
    for (int64_t i = 0; i < size; ++i) {
      store(load(x.at(i), n) - shift - log_sum, out.at(i), n);
    }
  }
};

struct LogSoftmaxGrad {
  static Vec summand(const Vec& g, const Vec& /*y*/) { return g; }
  static Vec result(const Vec& g, const Vec& y, const Vec& sum) {
    return at::vec::fmadd(exp(y), sum.neg(), g);  // cross_entropy_grad's too
  }
};

template <typename Function>
void grad_columns(Strip<const float> g, Strip<const float> y, Strip<float> out,
                  int64_t size, int64_t count) {
  for_each_vector(count, [&](int64_t c, auto n) {
    Vec sum(0.0f);
    for (int64_t i = 0; i < size; ++i) {
      sum = sum + Function::summand(load(g.at(i) + c, n), load(y.at(i) + c, n));
    }
    for (int64_t i = 0; i < size; ++i) {
      store(Function::result(load(g.at(i) + c, n), load(y.at(i) + c, n), sum),
            out.at(i) + c, n);
    }
  });
}

template <typename Function>
void softmax_columns(Strip<const float> x, Strip<float> out, int64_t size,
                     int64_t count) {
  for_each_vector(count, [&](int64_t c, auto n) {
    Vec shift(kNothing);
    for (int64_t i = 0; i < size; ++i) {
      shift = larger(shift, load(x.at(i) + c, n));
    }
    Function::columns(x.from(c), out.from(c), size, shift, n);
  });
}

// The tensor as [outer, size, inner], and who works on it.
struct Layout {
  explicit Layout(const OpView& op) {
    const Shape& shape = op.output(0).shape;
    const auto axis = static_cast<size_t>(op.attribute<int64_t>("axis"));
    size = shape[axis];
    for (size_t i = 0; i < shape.size(); ++i) {
      if (i < axis) outer *= shape[i];
      if (i > axis) inner *= shape[i];
    }
    blocks = ceil_div(inner, kColumns);
    shares = threads::Shares(threads::elements(4 * op.output(0).numel()),
                             outer * blocks);
  }

  int64_t outer = 1;
  int64_t size = 1;
  int64_t inner = 1;
  int64_t blocks;          // of columns
  threads::Shares shares;  // of blocks; a row is one where inner is 1
};

// A block of columns: rows of `inner` elements from `row` on.
struct Block {
  int64_t row;
  int64_t column;
  int64_t count;
};

// Calls body(block) for some of the blocks.
template <typename Body>
void for_each_block(const Layout& layout, threads::Range blocks,
                    const Body& body) {
  for (int64_t i = blocks.begin; i < blocks.end; ++i) {
    const int64_t first = i % layout.blocks * kColumns;
    body(Block{i / layout.blocks * layout.size, first,
               std::min(kColumns, layout.inner - first)});
  }
}

// The block in place, or gathered in `scratch`.
Strip<const float> gather(const RunContext& context, const RowInput& input,
                          const Layout& layout, const Block& block,
                          float* scratch) {
  const auto row = [&](int64_t i) {
    return input.read(context, block.row + i, block.column, block.count,
                      scratch + i * kColumns);
  };
  if (input.in_place()) return {row(0), layout.inner};
  for (int64_t i = 0; i < layout.size; ++i) static_cast<void>(row(i));
  return {scratch, kColumns};
}

// Where to compute the block: in place or in `scratch`.
Strip<float> space(const RunContext& context, const RowOutput& output,
                   const Layout& layout, const Block& block, float* scratch) {
  float* first = output.space(context, block.row, scratch);
  if (first == scratch) return {scratch, kColumns};
  return {first + block.column, layout.inner};
}

void scatter(const RunContext& context, const RowOutput& output,
             const Layout& layout, const Block& block, Strip<float> from) {
  if (output.in_place()) return;
  for (int64_t i = 0; i < layout.size; ++i) {
    output.write(context, block.row + i, block.column, block.count, from.at(i));
  }
}

template <typename Function>
class SoftmaxKernel final : public Kernel {
 public:
  explicit SoftmaxKernel(const OpView& op)
      : layout_(op),
        last_(layout_.inner == 1),
        x_(op, 0, last_ ? layout_.size : layout_.inner),
        out_(op, 0, last_ ? layout_.size : layout_.inner),
        scratch_(static_cast<size_t>(layout_.shares.limit())) {
    const int64_t floats =
        2 * (last_ ? padded(layout_.size) : kColumns * layout_.size);
    for (auto& share : scratch_) share.resize(static_cast<size_t>(floats));
  }

  void run(const RunContext& context) override {
    layout_.shares.run([&](int64_t share, threads::Range blocks) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      if (last_) {
        run_rows(context, blocks, scratch);
      } else {
        run_columns(context, blocks, scratch);
      }
    });
  }

 private:
  void run_rows(const RunContext& context, threads::Range rows,
                float* scratch) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      float* out = out_.space(context, row, scratch + padded(layout_.size));
      Function::row(x_.read(context, row, scratch), out, layout_.size);
      out_.store(context, row, out);
    }
  }

  void run_columns(const RunContext& context, threads::Range blocks,
                   float* scratch) {
    float* results = scratch + kColumns * layout_.size;
    for_each_block(layout_, blocks, [&](const Block& block) {
      const auto x = gather(context, x_, layout_, block, scratch);
      const auto out = space(context, out_, layout_, block, results);
      softmax_columns<Function>(x, out, layout_.size, block.count);
      scatter(context, out_, layout_, block, out);
    });
  }

  Layout layout_;
  bool last_;
  RowInput x_;
  RowOutput out_;
  std::vector<std::vector<float>> scratch_;  // by share
};

template <typename Function>
class SoftmaxGradKernel final : public Kernel {
 public:
  explicit SoftmaxGradKernel(const OpView& op)
      : layout_(op),
        last_(layout_.inner == 1),
        gradient_(op, 0, last_ ? layout_.size : layout_.inner),
        y_(op, 1, last_ ? layout_.size : layout_.inner),
        out_(op, 0, last_ ? layout_.size : layout_.inner),
        scratch_(static_cast<size_t>(layout_.shares.limit())) {
    const int64_t floats =
        3 * (last_ ? padded(layout_.size) : kColumns * layout_.size);
    for (auto& share : scratch_) share.resize(static_cast<size_t>(floats));
  }

  void run(const RunContext& context) override {
    layout_.shares.run([&](int64_t share, threads::Range blocks) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      if (last_) {
        run_rows(context, blocks, scratch);
      } else {
        run_columns(context, blocks, scratch);
      }
    });
  }

 private:
  void run_rows(const RunContext& context, threads::Range rows,
                float* scratch) {
    const int64_t step = padded(layout_.size);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float* gradient = gradient_.read(context, row, scratch);
      const float* y = y_.read(context, row, scratch + step);
      float* out = out_.space(context, row, scratch + 2 * step);
      grad_row<Function>(gradient, y, out, layout_.size);
      out_.store(context, row, out);
    }
  }

  void run_columns(const RunContext& context, threads::Range blocks,
                   float* scratch) {
    const int64_t step = kColumns * layout_.size;
    for_each_block(layout_, blocks, [&](const Block& block) {
      const auto g = gather(context, gradient_, layout_, block, scratch);
      const auto y = gather(context, y_, layout_, block, scratch + step);
      const auto out = space(context, out_, layout_, block, scratch + 2 * step);
      grad_columns<Function>(g, y, out, layout_.size, block.count);
      scatter(context, out_, layout_, block, out);
    });
  }

  Layout layout_;
  bool last_;
  RowInput gradient_;
  RowInput y_;
  RowOutput out_;
  std::vector<std::vector<float>> scratch_;  // by share
};

std::vector<TensorType> softmax_type(const OpCall& op) {
  const Shape& shape = op.input(0).shape;
  const auto axis = op.attribute<int64_t>("axis");
  op.require(axis < static_cast<int64_t>(shape.size()), "there is an axis ",
             axis);
  op.require(num_elements(shape) > 0, "there are elements");
  for (size_t i = 1; i < op.num_inputs(); ++i) op.require_shape(i, shape);
  return {{dtype_from_name(op.attribute<std::string>("dtype")), shape}};
}

}  // namespace

extern const OpDef kSoftmax{
    .name = "softmax",
    .schema =
        "softmax(Tensor{floats} x, *, int{0..} axis, bool log, "
        "dtype{floats} dtype, bool safe=False) -> Tensor",
    .family = "softmax",
    .shape = softmax_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      if (op.attribute<bool>("log")) {
        return std::make_unique<SoftmaxKernel<LogSoftmax>>(op);
      }
      if (op.attribute<bool>("safe")) {
        return std::make_unique<SoftmaxKernel<Softmax<true>>>(op);
      }
      return std::make_unique<SoftmaxKernel<Softmax<false>>>(op);
    },
    .work = elementwise<20>,
    .cheap = true,
};

extern const OpDef kSoftmaxGrad{
    .name = "softmax_grad",
    .schema =
        "softmax_grad(Tensor{floats} gradient, Tensor{floats} y, *, "
        "int{0..} axis, bool log, dtype{floats} dtype) -> Tensor",
    .family = "softmax",
    .shape = softmax_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      if (op.attribute<bool>("log")) {
        return std::make_unique<SoftmaxGradKernel<LogSoftmaxGrad>>(op);
      }
      return std::make_unique<SoftmaxGradKernel<SoftmaxGrad>>(op);
    },
    .work = elementwise<4>,
};

}  // namespace popsim::ops
