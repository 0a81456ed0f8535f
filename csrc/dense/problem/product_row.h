// The operations on the sums of a product.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

#include "dense/problem/matmul.h"

namespace popsim::dense {

// Applies the part of a MatmulSpec that comes after a @ b, for pieces of rows.
class ProductRow {
 public:
  explicit ProductRow(const MatmulSpec& spec)
      : spec_(spec),
        plain_(spec.alpha == 1.0F && spec.beta == 0.0F && !spec.bias &&
               !spec.relu && !spec.mask && !spec.update) {}

  // Whether the sums are the result.
  [[nodiscard]] bool plain() const { return plain_; }

  // `sums` must have whole vectors. `out` has `columns` elements from `column`
  // on, with the values that beta scales or that an update changes; it begins
  // at `offset` in c.
  void finish(const MatmulOperands& operands, const float* sums,
              int64_t columns, int64_t offset, int64_t column,
              float* out) const {
    if (spec_.update) {
      update(operands, sums, columns, offset, out);
      return;
    }
    for (int64_t j = 0; j < columns; j += kLanes) {
      const auto size = static_cast<int>(std::min(kLanes, columns - j));
      const auto load = [size](const float* from) {
        return size == kLanes ? Vec::loadu(from) : Vec::loadu(from, size);
      };
      Vec value = Vec::loadu(sums + j);
      if (spec_.alpha != 1.0F) value = value * Vec(spec_.alpha);
      if (spec_.bias) value = value + load(operands.bias + column + j);
      if (spec_.beta != 0.0F) {
        value = at::vec::fmadd(Vec(spec_.beta), load(out + j), value);
      }
      if (spec_.relu) value = at::vec::maximum(value, Vec(0.0F));
      if (spec_.mask) {
        const Vec closed = load(operands.mask + offset + j) <= Vec(0.0F);
        value = Vec::blendv(value, Vec(0.0F), closed);
      }
      value.store(out + j, size);
    }
  }

 private:
  using Vec = at::vec::Vectorized<float>;
  static constexpr int64_t kLanes = Vec::size();

  static void update(const MatmulOperands& operands, const float* sums,
                     int64_t columns, int64_t offset, float* out) {
    const Vec rate(-operands.rate);
    const Vec decay(operands.decay);
    float* kept = operands.sums == nullptr ? nullptr : operands.sums + offset;
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      const Vec sum = Vec::loadu(sums + j);
      if (kept != nullptr) sum.store(kept + j);
      at::vec::fmadd(rate, sum, decay * Vec::loadu(out + j)).store(out + j);
    }
    if (j == columns) return;
    const auto size = static_cast<int>(columns - j);
    const Vec sum = Vec::loadu(sums + j);
    if (kept != nullptr) sum.store(kept + j, size);
    at::vec::fmadd(rate, sum, decay * Vec::loadu(out + j, size))
        .store(out + j, size);
  }

  const MatmulSpec& spec_;
  bool plain_;
};

}  // namespace popsim::dense
