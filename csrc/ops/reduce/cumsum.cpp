// Running sums and products along an axis.
//
// The tensor is seen as [outer, size, inner], and the sums go along `size`. The
// elements are added up one by one in float64, as in PyTorch. Products are
// treated in the same way.
#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "ops/op_def.h"
#include "ops/operands/floats.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// Number of rows that are added up side by side, because an addition waits for
// the previous one of the same row. More rows would evict each other from the
// first-level cache.
constexpr int64_t kRows = 4;
// Number of elements of each row that are converted at a time.
constexpr int64_t kStretch = 512;
// Number of elements of a row that is added to a row of sums.
constexpr int64_t kColumns = 1024;
static_assert(kColumns <= kRows * kStretch, "they are converted, too");

struct Sum {
  static constexpr double kStart = 0.0;
  static double join(double sum, float x) {
    return sum + static_cast<double>(x);
  }
};

struct Product {
  static constexpr double kStart = 1.0;
  static double join(double product, float x) {
    return product * static_cast<double>(x);
  }
};

// Adds up kCount rows onto `sums`, which are kept for the next part of the
// rows.
template <typename Function, size_t kCount>
void add_up(const float* const* x, float* const* out, int64_t length,
            double* sums) {
  // Local copies that no other code can access, so the compiler keeps them in
  // registers.
  std::array<const float*, kCount> from;
  std::array<float*, kCount> to;
  std::array<double, kCount> sum;
  for (size_t row = 0; row < kCount; ++row) {
    from[row] = x[row];
    to[row] = out[row];
    sum[row] = sums[row];
  }
  for (int64_t i = 0; i < length; ++i) {
#pragma GCC unroll 8
    for (size_t row = 0; row < kCount; ++row) {
      sum[row] = Function::join(sum[row], from[row][i]);
      to[row][i] = static_cast<float>(sum[row]);
    }
  }
  for (size_t row = 0; row < kCount; ++row) sums[row] = sum[row];
}

template <typename Function>
class Cumulative final : public Kernel {
 public:
  explicit Cumulative(const OpView& op) : x_(op, 0), out_(op, 0) {
    const Shape& shape = op.output(0).shape;
    const auto axis =
        shape.begin() + static_cast<ptrdiff_t>(op.attribute<int64_t>("axis"));
    size_ = *axis;
    outer_ = num_elements({shape.begin(), axis});
    inner_ = num_elements({axis + 1, shape.end()});
    blocks_ = ceil_div(inner_, kColumns);
    shares_ = threads::Shares(
        threads::elements(2 * op.output(0).numel()),
        inner_ == 1 ? ceil_div(outer_, kRows) : outer_ * blocks_);
    scratch_.resize(static_cast<size_t>(shares_.limit()));
  }

  void run(const RunContext& context) override {
    shares_.run([&](int64_t share, threads::Range units) {
      Scratch& scratch = scratch_[static_cast<size_t>(share)];
      for (int64_t i = units.begin; i < units.end; ++i) {
        if (inner_ == 1) {
          add_rows(context, i * kRows, scratch);
        } else {
          add_columns(context, i / blocks_, i % blocks_ * kColumns, scratch);
        }
      }
    });
  }

 private:
  struct Scratch {
    std::array<float, kRows * kStretch> x;
    std::array<float, kRows * kStretch> out;
  };

  // Adds up the elements of rows whose elements are adjacent.
  void add_rows(const RunContext& context, int64_t first_row,
                Scratch& scratch) const {
    const int64_t rows = std::min(kRows, outer_ - first_row);
    std::array<double, kRows> sums;
    sums.fill(Function::kStart);
    std::array<const float*, kRows> x;
    std::array<float*, kRows> out;
    for (int64_t i = 0; i < size_; i += kStretch) {
      const int64_t length = std::min(kStretch, size_ - i);
      const auto element = [&](int64_t row) {
        return (first_row + row) * size_ + i;
      };
      for (int64_t row = 0; row < rows; ++row) {
        const auto at = static_cast<size_t>(row);
        x[at] = x_.read(context, element(row), length,
                        scratch.x.data() + row * kStretch);
        out[at] = out_.space(context, element(row),
                             scratch.out.data() + row * kStretch);
      }
      if (rows == kRows) {
        add_up<Function, kRows>(x.data(), out.data(), length, sums.data());
      } else {
        for (int64_t row = 0; row < rows; ++row) {
          add_up<Function, 1>(x.data() + row, out.data() + row, length,
                              sums.data() + row);
        }
      }
      for (int64_t row = 0; row < rows; ++row) {
        out_.store(context, element(row), length,
                   out[static_cast<size_t>(row)]);
      }
    }
  }

  // Adds up some columns of a matrix [size, inner].
  void add_columns(const RunContext& context, int64_t matrix, int64_t column,
                   Scratch& scratch) const {
    const int64_t count = std::min(kColumns, inner_ - column);
    std::array<double, kColumns> sums;
    sums.fill(Function::kStart);
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t element = (matrix * size_ + i) * inner_ + column;
      const float* x = x_.read(context, element, count, scratch.x.data());
      float* out = out_.space(context, element, scratch.out.data());
      for (int64_t j = 0; j < count; ++j) {
        double& sum = sums[static_cast<size_t>(j)];
        sum = Function::join(sum, x[j]);
        out[j] = static_cast<float>(sum);
      }
      out_.store(context, element, count, out);
    }
  }

  FloatReader x_;
  FloatWriter out_;
  int64_t outer_;
  int64_t size_;
  int64_t inner_;
  int64_t blocks_;  // of columns
  threads::Shares shares_;
  std::vector<Scratch> scratch_;  // by share
};

std::vector<TensorType> cumulative_type(const OpCall& op) {
  const auto axis = op.attribute<int64_t>("axis");
  op.require(axis < static_cast<int64_t>(op.input(0).shape.size()),
             "the input has an axis ", axis);
  return {op.input_type(0)};
}

}  // namespace

extern const OpDef kCumsum{
    .name = "cumsum",
    .schema = "cumsum(Tensor{floats} x, *, int{0..} axis) -> Tensor",
    .family = "reduce",
    .shape = cumulative_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Cumulative<Sum>>(op);
    },
    .work = elementwise<1>,
    .cheap = true,
    .only_overflows = true,
};

extern const OpDef kCumprod{
    .name = "cumprod",
    .schema = "cumprod(Tensor{floats} x, *, int{0..} axis) -> Tensor",
    .family = "reduce",
    .shape = cumulative_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Cumulative<Product>>(op);
    },
    .work = elementwise<1>,
    .cheap = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
