// Softmax and log-softmax over any axis, and their gradients.
//
// The tensor is seen as [outer, size, inner], and the softmax goes over `size`.
// Over the last axis (inner = 1) a row is a vector; otherwise a block of
// columns is processed at a time.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

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
    // cross_entropy_grad has the same formula.
    return at::vec::fmadd(exp(y), sum.neg(), g);
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

// The tensor as [outer, size, inner], and its division into shares.
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
  threads::Shares shares;  // of blocks; a row is a block if inner is 1
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

// Returns the block in place, or gathered in `scratch`.
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

// The memory for computing the block: in place or in `scratch`.
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

// Computes a row, or a block of columns, of one input.
template <typename Function>
struct Forward {
  static constexpr size_t kInputs = 1;
  static void row(std::span<const float* const> in, float* out, int64_t size) {
    Function::row(in[0], out, size);
  }
  static void columns(std::span<const Strip<const float>> in, Strip<float> out,
                      int64_t size, int64_t count) {
    softmax_columns<Function>(in[0], out, size, count);
  }
};

// The same with two inputs: a gradient, and the result of the forward op.
template <typename Function>
struct Backward {
  static constexpr size_t kInputs = 2;
  static void row(std::span<const float* const> in, float* out, int64_t size) {
    grad_row<Function>(in[0], in[1], out, size);
  }
  static void columns(std::span<const Strip<const float>> in, Strip<float> out,
                      int64_t size, int64_t count) {
    grad_columns<Function>(in[0], in[1], out, size, count);
  }
};

template <typename Direction>
class SoftmaxKernel final : public Kernel {
 public:
  explicit SoftmaxKernel(const OpView& op)
      : layout_(op),
        last_(layout_.inner == 1),
        step_(last_ ? padded(layout_.size) : kColumns * layout_.size),
        out_(op, 0, last_ ? layout_.size : layout_.inner),
        scratch_(static_cast<size_t>(layout_.shares.limit())) {
    for (size_t i = 0; i < kInputs; ++i) {
      inputs_.emplace_back(op, i, last_ ? layout_.size : layout_.inner);
    }
    const size_t floats = (kInputs + 1) * static_cast<size_t>(step_);
    for (auto& share : scratch_) share.resize(floats);
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
  static constexpr size_t kInputs = Direction::kInputs;

  void run_rows(const RunContext& context, threads::Range rows,
                float* scratch) {
    std::array<const float*, kInputs> in;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      float* next = scratch;
      for (size_t i = 0; i < kInputs; ++i, next += step_) {
        in[i] = inputs_[i].read(context, row, next);
      }
      float* out = out_.space(context, row, next);
      Direction::row(in, out, layout_.size);
      out_.store(context, row, out);
    }
  }

  void run_columns(const RunContext& context, threads::Range blocks,
                   float* scratch) {
    std::array<Strip<const float>, kInputs> in;
    for_each_block(layout_, blocks, [&](const Block& block) {
      float* next = scratch;
      for (size_t i = 0; i < kInputs; ++i, next += step_) {
        in[i] = gather(context, inputs_[i], layout_, block, next);
      }
      const auto out = space(context, out_, layout_, block, next);
      Direction::columns(in, out, layout_.size, block.count);
      scatter(context, out_, layout_, block, out);
    });
  }

  Layout layout_;
  bool last_;
  int64_t step_;  // scratch of one operand (elements)
  std::vector<RowInput> inputs_;
  RowOutput out_;
  std::vector<std::vector<float>> scratch_;  // by share
};

std::vector<TensorType> softmax_type(const OpCall& op) {
  const Shape& shape = op.input(0).shape;
  const auto axis = op.attribute<int64_t>("axis");
  op.require(axis < static_cast<int64_t>(shape.size()),
             "the input has an axis ", axis);
  op.require(num_elements(shape) > 0, "the input is not empty");
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
        return std::make_unique<SoftmaxKernel<Forward<LogSoftmax>>>(op);
      }
      if (op.attribute<bool>("safe")) {
        return std::make_unique<SoftmaxKernel<Forward<Softmax<true>>>>(op);
      }
      return std::make_unique<SoftmaxKernel<Forward<Softmax<false>>>>(op);
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
        return std::make_unique<SoftmaxKernel<Backward<LogSoftmaxGrad>>>(op);
      }
      return std::make_unique<SoftmaxKernel<Backward<SoftmaxGrad>>>(op);
    },
    .work = elementwise<4>,
};

}  // namespace popsim::ops
