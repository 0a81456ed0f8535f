// float16 numbers as sums of bfloat16 numbers.
//
// A bfloat16 has 8 significant bits, so two hold a float16 exactly. A product
// of matrices is then a sum of products of the parts, which processors with
// bfloat16 matrix units compute much faster than one of float32. Parts of a are
// paired with parts of b along the depth:
//   float16   a1b1 + a1b2 + a2b1, what is left out is below 2^-18 of a product
//   bfloat16  a1b1
// (float32 would take three parts and six pairs: as much memory traffic and
// work as the units save.)
#pragma once

#include <cstdint>
#include <span>

namespace popsim::dense {

// Which part of a and of b each stretch of the depth holds, from 0.
struct PartPairs {
  std::span<const int> of_a;
  std::span<const int> of_b;

  [[nodiscard]] int64_t count() const {
    return static_cast<int64_t>(of_a.size());
  }
};

// `significant_bits`: of the numbers: 11 or 8.
[[nodiscard]] PartPairs part_pairs(int significant_bits);

// A batch of matrices with one axis along the depth of a product.
struct SplitSource {
  const float* data;
  int64_t batch;
  int64_t rows;  // of the other axis
  int64_t depth;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t depth_stride;
};

// Writes bfloat16 numbers [batch][rows][stretches * depth], each stretch the
// part that `parts` says. Returns false, with an unusable result, when a number
// is too large to be split, infinite or NaN.
[[nodiscard]] bool split_depth_inner(const SplitSource& source,
                                     std::span<const int> parts, uint16_t* out);
// The same for numbers whose rows have stride 1, to
// [batch][stretches * depth][rows].
[[nodiscard]] bool split_depth_outer(const SplitSource& source,
                                     std::span<const int> parts, uint16_t* out);

}  // namespace popsim::dense
