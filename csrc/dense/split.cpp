#include "dense/split.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>

#include "base/check.h"

namespace popsim::dense {
namespace {

constexpr std::array kHalfA{0, 0, 1};
constexpr std::array kHalfB{0, 1, 0};
constexpr std::array kBrainFloat{0};

constexpr int kMaxParts = 2;
// Numbers split at a time, in L1.
constexpr int64_t kChunk = 512;
constexpr int kBlock = 16;
// Numbers that are worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;

// Larger ones might round to infinity.
constexpr uint32_t kTooLarge = 0x7f000000;

using Parts = std::array<std::array<uint16_t, kChunk>, kMaxParts>;

// The nearest bfloat16, in the upper half of a float32.
inline uint32_t rounded(uint32_t bits) {
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
}

// Takes the nearest bfloat16 numbers off `rest`.
void take_part(float* rest, int64_t count, uint16_t* part) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = rounded(std::bit_cast<uint32_t>(rest[i]));
    part[i] = static_cast<uint16_t>(bits >> 16);
    rest[i] -= std::bit_cast<float>(bits);
  }
}

uint32_t largest_magnitude(const float* numbers, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) {
    largest =
        std::max(largest, std::bit_cast<uint32_t>(numbers[i]) & 0x7fffffffU);
  }
  return largest;
}

// Returns false when a number cannot be split.
bool split(const float* numbers, int64_t count, int num_parts, Parts& parts) {
  alignas(64) std::array<float, kChunk> rest;
  std::copy_n(numbers, count, rest.data());
  for (int part = 0; part < num_parts; ++part) {
    take_part(rest.data(), count, parts[static_cast<size_t>(part)].data());
  }
  return largest_magnitude(numbers, count) < kTooLarge;
}

int num_parts_of(std::span<const int> parts) {
  return 1 + *std::max_element(parts.begin(), parts.end());
}

// Splits `count` numbers and writes each stretch's part, stretches `step`
// apart.
bool write_stretches(const float* numbers, int64_t count,
                     std::span<const int> parts, int num_parts, int64_t step,
                     uint16_t* out) {
  bool good = true;
  Parts split_parts;
  for (int64_t first = 0; first < count; first += kChunk) {
    const int64_t size = std::min(kChunk, count - first);
    good = split(numbers + first, size, num_parts, split_parts) && good;
    for (size_t i = 0; i < parts.size(); ++i) {
      std::copy_n(split_parts[static_cast<size_t>(parts[i])].data(), size,
                  out + static_cast<int64_t>(i) * step + first);
    }
  }
  return good;
}

// Calls body(batch, first, last) for blocks of rows; false if any call is.
template <typename Body>
bool for_each_rows(int64_t batch, int64_t rows, int64_t row_size,
                   const Body& body) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrain / (kBlock * row_size));
  std::atomic<bool> good = true;
  at::parallel_for(0, batch * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * kBlock;
      if (!body(i / blocks, first, std::min(first + kBlock, rows))) {
        good = false;
      }
    }
  });
  return good;
}

// Copies rows [first, last) at depth [begin, begin + size) to rows of kChunk.
void gather(const SplitSource& source, const float* matrix, int64_t first,
            int64_t last, int64_t begin, int64_t size, float* out) {
  int64_t depth = 0;
  if (source.row_stride == 1 && last - first == kBlock) {
    for (; depth + kBlock <= size; depth += kBlock) {
      at::vec::transpose_mxn<float, kBlock, kBlock>(
          matrix + first + (begin + depth) * source.depth_stride,
          source.depth_stride, out + depth, kChunk);
    }
  }
  for (int64_t row = first; row < last; ++row) {
    const float* numbers =
        matrix + row * source.row_stride + begin * source.depth_stride;
    for (int64_t d = depth; d < size; ++d) {
      out[(row - first) * kChunk + d] = numbers[d * source.depth_stride];
    }
  }
}

}  // namespace

PartPairs part_pairs(int significant_bits) {
  switch (significant_bits) {
    case 11:
      return {kHalfA, kHalfB};
    case 8:
      return {kBrainFloat, kBrainFloat};
    default:
      throw InternalError(
          join("part_pairs: no parts for ", significant_bits, " bits"));
  }
}

bool split_depth_inner(const SplitSource& source, std::span<const int> parts,
                       uint16_t* out) {
  const int num_parts = num_parts_of(parts);
  const int64_t row_size = static_cast<int64_t>(parts.size()) * source.depth;
  return for_each_rows(
      source.batch, source.rows, source.depth,
      [&](int64_t batch, int64_t first, int64_t last) {
        const float* matrix = source.data + batch * source.batch_stride;
        uint16_t* rows = out + (batch * source.rows + first) * row_size;
        bool good = true;
        if (source.depth_stride == 1) {
          for (int64_t row = first; row < last; ++row) {
            good = write_stretches(matrix + row * source.row_stride,
                                   source.depth, parts, num_parts, source.depth,
                                   rows + (row - first) * row_size) &&
                   good;
          }
          return good;
        }
        alignas(64) std::array<float, static_cast<size_t>(kBlock * kChunk)>
            block;
        for (int64_t begin = 0; begin < source.depth; begin += kChunk) {
          const int64_t size = std::min(kChunk, source.depth - begin);
          gather(source, matrix, first, last, begin, size, block.data());
          for (int64_t row = first; row < last; ++row) {
            good = write_stretches(block.data() + (row - first) * kChunk, size,
                                   parts, num_parts, source.depth,
                                   rows + (row - first) * row_size + begin) &&
                   good;
          }
        }
        return good;
      });
}

bool split_depth_outer(const SplitSource& source, std::span<const int> parts,
                       uint16_t* out) {
  const int num_parts = num_parts_of(parts);
  const int64_t stretch = source.depth * source.rows;
  // The blocks are of the depth here: each number along it has a row of output.
  return for_each_rows(
      source.batch, source.depth, source.rows,
      [&](int64_t batch, int64_t first, int64_t last) {
        const float* matrix = source.data + batch * source.batch_stride;
        uint16_t* rows =
            out + batch * static_cast<int64_t>(parts.size()) * stretch;
        bool good = true;
        for (int64_t d = first; d < last; ++d) {
          good = write_stretches(matrix + d * source.depth_stride, source.rows,
                                 parts, num_parts, stretch,
                                 rows + d * source.rows) &&
                 good;
        }
        return good;
      });
}

}  // namespace popsim::dense
