#include "dense/tile/plain_block.h"

// GCC 12 warns of uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <ATen/cpu/vec/vec.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <array>

#include "base/check.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kRowVectors = kBlock / Vec::size();

// One step along the depth of an operand: [depth][row].
using Step = std::array<std::array<float, kBlock>, kStepDepth>;

template <typename Number>
void read_step(const PartSource& source, int64_t first_row, int64_t first_depth,
               int64_t depth, Step& step) {
  const auto* numbers = static_cast<const Number*>(source.data) +
                        first_row * source.row_stride +
                        first_depth * source.depth_stride;
  const int64_t rows = std::min(kBlock, source.rows - first_row);
  for (int64_t i = 0; i < depth; ++i) {
    std::array<float, kBlock>& to = step[static_cast<size_t>(i)];
    to.fill(0.0F);
    for (int64_t row = 0; row < rows; ++row) {
      to[static_cast<size_t>(row)] = static_cast<float>(
          numbers[row * source.row_stride + i * source.depth_stride]);
    }
  }
}

void read_step(const PartSource& source, int64_t first_row, int64_t first_depth,
               int64_t depth, Step& step) {
  switch (source.dtype) {
    case DType::kFloat32:
      return read_step<float>(source, first_row, first_depth, depth, step);
    case DType::kFloat16:
      return read_step<at::Half>(source, first_row, first_depth, depth, step);
    case DType::kBFloat16:
      return read_step<at::BFloat16>(source, first_row, first_depth, depth,
                                     step);
    default:
      throw InternalError(
          join("multiply_plain_block: ", name_of(source.dtype)));
  }
}

// Adds a row of the product of two steps to `sums`.
void add_row(const Step& a, const Step& b, size_t row, int64_t depth,
             float* sums) {
  std::array<Vec, static_cast<size_t>(kRowVectors)> row_sums;
  row_sums.fill(Vec(0.0F));
  for (size_t i = 0; i < static_cast<size_t>(depth); ++i) {
    const Vec factor(a[i][row]);
    for (size_t j = 0; j < row_sums.size(); ++j) {
      const Vec numbers = Vec::loadu(b[i].data() + j * Vec::size());
      row_sums[j] = at::vec::fmadd(factor, numbers, row_sums[j]);
    }
  }
  for (const Vec& sum : row_sums) {
    (Vec::loadu(sums) + sum).store(sums);
    sums += Vec::size();
  }
}

}  // namespace

void multiply_plain_block(const PlainBlock& block, float* sums,
                          int64_t stride) {
  alignas(64) Step a;
  alignas(64) Step b;
  for (int64_t row = 0; row < kBlock; ++row) {
    std::fill_n(sums + row * stride, kBlock, 0.0F);
  }
  for (int64_t first = block.first_depth; first < block.last_depth;
       first += kStepDepth) {
    const int64_t depth = std::min(kStepDepth, block.last_depth - first);
    read_step(block.a, block.row, first, depth, a);
    read_step(block.b, block.column, first, depth, b);
    for (int64_t row = 0; row < kBlock; ++row) {
      add_row(a, b, static_cast<size_t>(row), depth, sums + row * stride);
    }
  }
}

}  // namespace popsim::dense
