#include "dense/vector/vector_matmul.h"

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "dense/problem/product_row.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
// Number of sums that are computed at a time.
constexpr int64_t kSums = 128;
constexpr int64_t kVectors = kSums / kLanes;

using Sums = std::array<float, static_cast<size_t>(kSums)>;

// Neighbours along the depth are `depth` apart, those along the result `sum`.
struct MatrixWalk {
  const float* data;
  int64_t depth;
  int64_t sum;
};

// For matrices whose rows go along the result.
void add_rows(const float* x, const MatrixWalk& matrix, int64_t length,
              int64_t count, Sums& out) {
  const int64_t vectors = ceil_div(count, kLanes);
  const int64_t rest = count - (vectors - 1) * kLanes;
  const auto add = [&]<bool kAll>(std::bool_constant<kAll> /*all*/) {
    std::array<Vec, static_cast<size_t>(kVectors)> sums;
    sums.fill(Vec(0.0F));
    const float* row = matrix.data;
    for (int64_t d = 0; d < length; ++d, row += matrix.depth) {
      const Vec factor(x[d]);
      for (int64_t v = 0; v < (kAll ? kVectors : vectors); ++v) {
        const bool whole = kAll || v + 1 < vectors || rest == kLanes;
        const Vec values = whole ? Vec::loadu(row + v * kLanes)
                                 : Vec::loadu(row + v * kLanes, rest);
        auto& sum = sums[static_cast<size_t>(v)];
        sum = at::vec::fmadd(factor, values, sum);
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      sums[static_cast<size_t>(v)].store(out.data() + v * kLanes);
    }
  };
  if (count == kSums) {
    add(std::true_type());
  } else {
    add(std::false_type());
  }
}

float sum_across(const Vec& sums) {
  alignas(64) std::array<float, static_cast<size_t>(kLanes)> lanes;
  sums.store(lanes.data());
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      lanes[static_cast<size_t>(i)] += lanes[static_cast<size_t>(i + half)];
    }
  }
  return lanes[0];
}

// Computes kCount sums whose terms are adjacent.
template <size_t kCount>
void add_columns(const float* x, const MatrixWalk& matrix, int64_t length,
                 float* out) {
  constexpr size_t kParts = kCount == 1 ? 4 : 2;
  constexpr auto kStep = static_cast<int64_t>(kParts) * kLanes;
  std::array<std::array<Vec, kParts>, kCount> sums;
  for (auto& of_sum : sums) of_sum.fill(Vec(0.0F));
  int64_t d = 0;
  for (; d + kStep <= length; d += kStep) {
    for (size_t part = 0; part < kParts; ++part) {
      const int64_t at = d + static_cast<int64_t>(part) * kLanes;
      const Vec factor = Vec::loadu(x + at);
      for (size_t i = 0; i < kCount; ++i) {
        const float* column =
            matrix.data + static_cast<int64_t>(i) * matrix.sum;
        sums[i][part] =
            at::vec::fmadd(factor, Vec::loadu(column + at), sums[i][part]);
      }
    }
  }
  for (; d < length; d += kLanes) {
    const int64_t count = std::min(kLanes, length - d);
    const Vec factor = Vec::loadu(x + d, count);
    for (size_t i = 0; i < kCount; ++i) {
      const float* column = matrix.data + static_cast<int64_t>(i) * matrix.sum;
      sums[i][0] =
          at::vec::fmadd(factor, Vec::loadu(column + d, count), sums[i][0]);
    }
  }
  for (size_t i = 0; i < kCount; ++i) {
    Vec sum = sums[i][0];
    for (size_t part = 1; part < kParts; ++part) sum = sum + sums[i][part];
    out[i] = sum_across(sum);
  }
}

class VectorMatmul final : public Matmul {
 public:
  explicit VectorMatmul(const MatmulSpec& spec)
      : spec_(spec),
        row_(spec_),
        a_is_matrix_(spec.n == 1 && spec.m > 1),
        count_(a_is_matrix_ ? spec.m : spec.n),
        vector_stride_(a_is_matrix_ ? spec.b.row : spec.a.column),
        shares_(spec.one_thread ? threads::Work{}
                                : threads::elements(count_ * spec.k),
                ceil_div(count_, kSums)) {}

  size_t workspace_bytes() const override {
    return vector_stride_ == 1 ? 0
                               : sizeof(float) * static_cast<size_t>(spec_.k);
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    const float* x = load_vector(operands);
    const MatrixStrides& strides = a_is_matrix_ ? spec_.a : spec_.b;
    const MatrixWalk matrix{
        a_is_matrix_ ? operands.a_floats() : operands.b_floats(),
        a_is_matrix_ ? strides.column : strides.row,
        a_is_matrix_ ? strides.row : strides.column};
    shares_.run([&](int64_t /*share*/, threads::Range blocks) {
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        run_block(operands, x, matrix, i * kSums);
      }
    });
  }

 private:
  const float* load_vector(const MatmulOperands& operands) const {
    const float* from =
        a_is_matrix_ ? operands.b_floats() : operands.a_floats();
    if (vector_stride_ == 1) return from;
    auto* x = static_cast<float*>(operands.workspace);
    for (int64_t d = 0; d < spec_.k; ++d) x[d] = from[d * vector_stride_];
    return x;
  }

  // Computes kSums sums from `first` on.
  void run_block(const MatmulOperands& operands, const float* x,
                 MatrixWalk matrix, int64_t first) const {
    const int64_t count = std::min(kSums, count_ - first);
    matrix.data += first * matrix.sum;
    alignas(64) Sums sums;
    if (matrix.sum == 1) {
      add_rows(x, matrix, spec_.k, count, sums);
    } else {
      int64_t i = 0;
      for (; i + 4 <= count; i += 4, matrix.data += 4 * matrix.sum) {
        add_columns<4>(x, matrix, spec_.k, sums.data() + i);
      }
      for (; i < count; ++i, matrix.data += matrix.sum) {
        add_columns<1>(x, matrix, spec_.k, sums.data() + i);
      }
    }
    finish(operands, sums, first, count);
  }

  void finish(const MatmulOperands& operands, const Sums& sums, int64_t first,
              int64_t count) const {
    float* c = operands.c_floats() + first;
    if (!spec_.bias || !a_is_matrix_) {
      row_.finish(operands, sums.data(), count, first, first, c);
      return;
    }
    // The sums are rows of one column, so all of them have the bias of this
    // column.
    Sums bias;
    bias.fill(operands.bias[0]);
    MatmulOperands with_bias = operands;
    with_bias.bias = bias.data();
    row_.finish(with_bias, sums.data(), count, first, 0, c);
  }

  MatmulSpec spec_;
  ProductRow row_;
  bool a_is_matrix_;
  int64_t count_;  // of sums
  int64_t vector_stride_;
  threads::Shares shares_;
};

}  // namespace

std::unique_ptr<Matmul> create_vector_matmul(const MatmulSpec& spec) {
  const bool is_vector = spec.batch == 1 && (spec.m == 1 || spec.n == 1);
  if (!is_vector ||
      !(spec.n == 1 && spec.m > 1 ? spec.a : spec.b).has_unit_stride()) {
    return nullptr;
  }
  return std::make_unique<VectorMatmul>(spec);
}

}  // namespace popsim::dense
