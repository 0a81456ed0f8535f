#include "dense/vector/half_matmul.h"

#include <algorithm>

#include "base/check.h"
#include "base/numbers.h"
#include "dense/vector/panels.h"
#include "dense/vector/transpose.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

// The side of the blocks in which a matrix is transposed.
constexpr int kBlock = 16;

// Writes rows [first, first + kBlock), row-major, of a matrix that is stored by
// columns; the columns are `column` elements apart.
void transpose_rows(const float* a, int64_t column, int64_t first, int64_t rows,
                    int64_t columns, float* out) {
  const int64_t count = std::min<int64_t>(kBlock, rows - first);
  for (int64_t k = 0; k < columns; k += kBlock) {
    const int64_t depth = std::min<int64_t>(kBlock, columns - k);
    const float* block = a + k * column + first;
    float* to = out + first * columns + k;
    transpose_block<kBlock>(block, column, to, columns, depth, count);
  }
}

Vec load(const float* from, int64_t count) {
  return count == kLanes ? Vec::loadu(from) : Vec::loadu(from, count);
}

class HalfMatmul final : public Matmul {
 public:
  explicit HalfMatmul(const MatmulSpec& spec)
      : spec_(spec),
        panels_(1, spec.n, spec.k, passes_of(spec.k)),
        row_major_(spec.a.column == 1),
        a_batch_(spec.a.batch == 0 ? 1 : spec.batch),
        b_batch_(spec.b.batch == 0 ? 1 : spec.batch),
        row_groups_(ceil_div(spec.m, kGroupRows)) {}

  size_t workspace_bytes() const override {
    const int64_t copied = row_major_ ? 0 : a_batch_ * spec_.m * spec_.k;
    return sizeof(float) * static_cast<size_t>(packed_floats() + copied);
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    float* packed = static_cast<float*>(operands.workspace);
    pack(operands.b_floats(), packed);
    if (!row_major_) transpose(operands.a_floats(), packed + packed_floats());
    const Rows a = rows_of(operands);
    const int64_t per_batch = panels_.count() * row_groups_;
    const int64_t work =
        spec_.batch * spec_.m * panels_.count() * panels_.panel_floats();
    const threads::Shares shares(threads::multiplications(work),
                                 spec_.batch * per_batch);
    shares.run([&](int64_t /*share*/, Range units) {
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        multiply(operands, a, packed, unit / per_batch, unit % per_batch);
      }
    });
  }

 private:
  struct Rows {
    const float* first;
    int64_t batch;  // strides
    int64_t row;
  };

  [[nodiscard]] int64_t packed_floats() const {
    return b_batch_ * panels_.count() * panels_.panel_floats();
  }

  [[nodiscard]] Rows rows_of(const MatmulOperands& operands) const {
    if (row_major_) return {operands.a_floats(), spec_.a.batch, spec_.a.row};
    const int64_t batch = spec_.a.batch == 0 ? 0 : spec_.m * spec_.k;
    return {static_cast<float*>(operands.workspace) + packed_floats(), batch,
            spec_.k};
  }

  void pack(const float* b, float* packed) const {
    const int64_t count = panels_.count();
    const bool by_rows = spec_.b.column == 1;
    const threads::Shares shares(threads::elements(packed_floats()),
                                 b_batch_ * count);
    shares.run([&](int64_t /*share*/, Range units) {
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const float* from = b + unit / count * spec_.b.batch;
        const Range panel{unit % count, unit % count + 1};
        float* to = packed + unit / count * count * panels_.panel_floats();
        if (by_rows) {
          panels_.pack(from, spec_.b.row, panel, to);
        } else {
          panels_.pack_transposed(from, spec_.b.column, panel, to);
        }
      }
    });
  }

  void transpose(const float* a, float* out) const {
    const int64_t blocks = ceil_div(spec_.m, kBlock);
    const threads::Shares shares(
        threads::elements(a_batch_ * spec_.m * spec_.k), a_batch_ * blocks);
    shares.run([&](int64_t /*share*/, Range units) {
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const int64_t batch = unit / blocks;
        transpose_rows(a + batch * spec_.a.batch, spec_.a.column,
                       unit % blocks * kBlock, spec_.m, spec_.k,
                       out + batch * spec_.m * spec_.k);
      }
    });
  }

  // Multiplies some rows with one panel: adjacent indices of `unit` share the
  // panel.
  void multiply(const MatmulOperands& operands, const Rows& a,
                const float* packed, int64_t batch, int64_t unit) const {
    const int64_t panel = unit / row_groups_;
    const int64_t first = unit % row_groups_ * kGroupRows;
    const Range rows{first, std::min(first + kGroupRows, spec_.m)};
    if (b_batch_ > 1) {
      packed += batch * panels_.count() * panels_.panel_floats();
    }
    panels_.multiply(packed, a.first + batch * a.batch, a.row, rows,
                     {panel, panel + 1},
                     [&](int64_t row, int64_t column, int64_t count,
                         const float* product, int64_t /*stride*/) {
                       store(operands, batch * spec_.m + row, column, count,
                             Vec::loadu(product));
                     });
  }

  void store(const MatmulOperands& operands, int64_t row, int64_t column,
             int64_t count, Vec value) const {
    const int64_t at = row * spec_.n + column;
    float* out = operands.c_floats() + at;
    const Vec alpha(spec_.alpha);
    const Vec zero(0.0f);
    if (spec_.bias) {
      value = value + load(operands.bias + column, count);
    } else if (spec_.beta != 0.0f) {
      const Vec before = Vec(spec_.beta) * load(out, count);
      value = at::vec::fmadd(alpha, value, before);
    } else {
      value = alpha * value;
    }
    if (spec_.relu) value = Vec::blendv(value, zero, value < zero);
    if (spec_.mask) {
      const Vec gate = load(operands.mask + at, count);
      value = Vec::blendv(value, zero, gate <= zero);
    }
    value.store(out, static_cast<int>(count));
  }

  MatmulSpec spec_;
  Panels panels_;
  bool row_major_;
  int64_t a_batch_;
  int64_t b_batch_;
  int64_t row_groups_;
};

}  // namespace

std::unique_ptr<Matmul> create_half_matmul(const MatmulSpec& spec) {
  check_internal(!spec.update, "an update by a product with half partials");
  if (!spec.a.has_unit_stride() || !spec.b.has_unit_stride()) return nullptr;
  return std::make_unique<HalfMatmul>(spec);
}

}  // namespace popsim::dense
