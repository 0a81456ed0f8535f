// Logarithms of running sums of exponentials.
//
// A column has the largest element so far, and the sum of the exponentials of
// the differences to it, in float64. Many columns are computed together, in
// vectors. If the elements of a row are adjacent, some rows are transposed
// first.
#include <algorithm>
#include <array>
#include <limits>

#include "ops/math/vec_math.h"
#include "ops/operands/float_operand.h"
#include "ops/reduce/along_axis.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class RunningLogSums {
 public:
  static constexpr int64_t kMost = 64;  // columns

  RunningLogSums() { largest_.fill(-kInfinity); }

  // Adds an element to each column, and writes the logarithms of the sums.
  void add(const float* x, float* out, int64_t count) {
    std::array<float, kMost> factors;
    std::array<float, kMost> terms;
    std::array<float, kMost> sums;
    for_each_vector(count, [&](int64_t i, auto n) {
      const Vec next = load(x + i, n);
      const Vec before = load(largest_.data() + i, n);
      const Vec largest = at::vec::maximum(before, next);  // NaN stays NaN
      // The difference of two equal infinities must be zero.
      const Vec none(0.0f);
      const Vec fall = Vec::blendv(before - largest, none, before == largest);
      const Vec rise = Vec::blendv(next - largest, none, next == largest);
      store(exp(fall), factors.data() + i, n);
      store(exp(rise), terms.data() + i, n);
      store(largest, largest_.data() + i, n);
    });
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      sums_[at] = sums_[at] * static_cast<double>(factors[at]) +
                  static_cast<double>(terms[at]);
      sums[at] = static_cast<float>(sums_[at]);
    }
    for_each_vector(count, [&](int64_t i, auto n) {
      const Vec largest = load(largest_.data() + i, n);
      const Vec sum = log(load(sums.data() + i, n));
      const Vec infinite = largest.abs() == Vec(kInfinity);
      store(Vec::blendv(largest + sum, largest, infinite), out + i, n);
    });
  }

 private:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  std::array<float, kMost> largest_;
  std::array<double, kMost> sums_{};
};

class LogCumsumExp final : public Kernel {
 public:
  explicit LogCumsumExp(const OpView& op)
      : x_(op.input_id(0), op.input(0), workspace_),
        y_(op.output_id(0), op.output(0), workspace_) {
    const Shape& shape = op.output(0).shape;
    const auto axis =
        shape.begin() + static_cast<ptrdiff_t>(op.attribute<int64_t>("axis"));
    size_ = *axis;
    outer_ = num_elements({shape.begin(), axis});
    inner_ = num_elements({axis + 1, shape.end()});
    blocks_ = ceil_div(inner_, RunningLogSums::kMost);
    shares_ = threads::Shares(
        threads::elements(10 * op.output(0).numel()),
        inner_ == 1 ? ceil_div(outer_, kRows) : outer_ * blocks_);
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* x = x_.load(context, workspace);
    float* y = y_.buffer(context, workspace);
    shares_.run([&](int64_t /*share*/, threads::Range units) {
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        if (inner_ == 1) {
          add_rows(x, y, unit * kRows);
        } else {
          add_columns(x, y, unit);
        }
      }
    });
    y_.store(context, workspace);
  }

 private:
  static constexpr int64_t kRows = 16;  // that are transposed together

  void add_columns(const float* x, float* y, int64_t unit) const {
    const int64_t column = unit % blocks_ * RunningLogSums::kMost;
    const int64_t count = std::min(RunningLogSums::kMost, inner_ - column);
    int64_t first = unit / blocks_ * size_ * inner_ + column;
    RunningLogSums sums;
    for (int64_t i = 0; i < size_; ++i, first += inner_) {
      sums.add(x + first, y + first, count);
    }
  }

  void add_rows(const float* x, float* y, int64_t first) const {
    const int64_t count = std::min(kRows, outer_ - first);
    RunningLogSums sums;
    std::array<float, kRows> column;
    for (int64_t i = 0; i < size_; ++i) {
      for (int64_t row = 0; row < count; ++row) {
        column[static_cast<size_t>(row)] = x[(first + row) * size_ + i];
      }
      sums.add(column.data(), column.data(), count);
      for (int64_t row = 0; row < count; ++row) {
        y[(first + row) * size_ + i] = column[static_cast<size_t>(row)];
      }
    }
  }

  Workspace workspace_;
  FloatInput x_;
  FloatOutput y_;
  int64_t outer_;
  int64_t size_;
  int64_t inner_;
  int64_t blocks_;  // of columns
  threads::Shares shares_;
};

}  // namespace

extern const OpDef kLogcumsumexp{
    .name = "logcumsumexp",
    .schema = "logcumsumexp(Tensor{floats} x, *, int{0..} axis) -> Tensor",
    .family = "reduce",
    .shape = [](const OpCall& op) -> std::vector<TensorType> {
      require_axis(op);
      return {op.input_type(0)};
    },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<LogCumsumExp>(op);
    },
    .work = elementwise<10>,
};

}  // namespace popsim::ops
