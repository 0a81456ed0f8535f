#include "dense/tile/parts.h"

#include "base/check.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <ATen/cpu/vec/vec.h>
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <limits>

// GCC 12 sees uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace popsim::dense {
namespace {

constexpr int64_t kLanes = 16;

__mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>((1U << std::clamp<int64_t>(count, 0, kLanes)) -
                                1U);
}

__m512 widened(__m256i bfloat16) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

__m512 widened(__m256i narrow, DType dtype) {
  return dtype == DType::kFloat16 ? _mm512_cvtph_ps(narrow) : widened(narrow);
}

// Sixteen numbers as float32.
template <DType kType>
__m512 load(const void* data, int64_t offset) {
  if constexpr (kType == DType::kFloat32) {
    return _mm512_loadu_ps(static_cast<const float*>(data) + offset);
  } else {
    const auto* numbers = static_cast<const uint16_t*>(data) + offset;
    return widened(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)), kType);
  }
}

// The same, with zeros beyond the mask.
template <DType kType>
__m512 load(const void* data, int64_t offset, __mmask16 lanes) {
  if constexpr (kType == DType::kFloat32) {
    return _mm512_maskz_loadu_ps(lanes,
                                 static_cast<const float*>(data) + offset);
  } else {
    const auto* numbers = static_cast<const uint16_t*>(data) + offset;
    return widened(_mm256_maskz_loadu_epi16(lanes, numbers), kType);
  }
}

// 32 numbers, those that meet in one element of a tile's row side by side: the
// depth of a step is in the order 0, 16, 1, 17, ...
struct Numbers {
  __m512 low;
  __m512 high;
};

__m512i bits_of(__m512 numbers) { return _mm512_castps_si512(numbers); }

__m512 upper_halves(__m512i bits) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// The nearest bfloat16 numbers, as float32.
__m512 rounded(__m512 numbers) {
  return upper_halves(
      _mm512_add_epi32(bits_of(numbers), _mm512_set1_epi32(0x8000)));
}

__m512i magnitude(__m512 numbers) {
  return _mm512_and_si512(bits_of(numbers), _mm512_set1_epi32(0x7fffffff));
}

// The same, but towards zero where the nearest would be infinite. NaN stays
// NaN.
__m512 rounded_within_range(__m512 numbers) {
  const __m512i large = _mm512_set1_epi32(static_cast<int>(kTooLarge));
  const __mmask16 is_large = _mm512_cmpge_epi32_mask(magnitude(numbers), large);
  const __m512 near = _mm512_mask_mov_ps(rounded(numbers), is_large,
                                         upper_halves(bits_of(numbers)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(
      near, is_nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}

// bfloat16 numbers that are float32 so far.
__m512i joined(const Numbers& numbers) {
  return _mm512_or_si512(_mm512_srli_epi32(bits_of(numbers.low), 16),
                         bits_of(numbers.high));
}

template <int kParts>
struct Parts {
  __m512i of[kParts];
};

// The parts of 32 numbers at a time.
template <int kParts, bool kBounded>
class Splitter {
 public:
  void split(Numbers numbers, Parts<kParts>& parts) {
    if constexpr (kParts > 1) {
      largest_ = _mm512_max_epu32(
          largest_,
          _mm512_max_epu32(magnitude(numbers.low), magnitude(numbers.high)));
    }
#pragma GCC unroll 2
    for (int part = 0; part + 1 < kParts; ++part) {
      const bool bounded = kBounded && part == 0;
      const Numbers near =
          bounded ? Numbers{rounded_within_range(numbers.low),
                            rounded_within_range(numbers.high)}
                  : Numbers{rounded(numbers.low), rounded(numbers.high)};
      numbers = {_mm512_sub_ps(numbers.low, near.low),
                 _mm512_sub_ps(numbers.high, near.high)};
      parts.of[part] = joined(near);
    }
    // What is left has no more bits than a bfloat16, or is too small for one.
    parts.of[kParts - 1] =
        joined({numbers.low, upper_halves(bits_of(numbers.high))});
  }

  [[nodiscard]] uint32_t largest() const {
    return _mm512_reduce_max_epu32(largest_);
  }

 private:
  __m512i largest_ = _mm512_setzero_si512();
};

// Where the first number of a tile is, and how much of the matrix is left.
struct Corner {
  const void* data;
  int64_t offset;
  int64_t row_stride;
  int64_t depth_stride;
  int64_t rows;
  int64_t depth;
};

// Numbers i of a tile: a row of it where the depth has stride 1, else two of
// the depth from all its rows.
template <DType kType, bool kDepthInner>
Numbers read(const Corner& from, int64_t i) {
  if constexpr (kDepthInner) {
    const int64_t at = from.offset + i * from.row_stride;
    return {load<kType>(from.data, at), load<kType>(from.data, at + kLanes)};
  } else {
    const int64_t at = from.offset + i * from.depth_stride;
    return {load<kType>(from.data, at),
            load<kType>(from.data, at + kLanes * from.depth_stride)};
  }
}

// The same at an edge of the matrix, with zeros beyond it.
template <DType kType, bool kDepthInner>
Numbers read_edge(const Corner& from, int64_t i) {
  if constexpr (kDepthInner) {
    if (i >= from.rows) return {_mm512_setzero_ps(), _mm512_setzero_ps()};
    const int64_t at = from.offset + i * from.row_stride;
    return {
        load<kType>(from.data, at, first_lanes(from.depth)),
        load<kType>(from.data, at + kLanes, first_lanes(from.depth - kLanes))};
  } else {
    const auto row_of = [&](int64_t depth) {
      if (depth >= from.depth) return _mm512_setzero_ps();
      return load<kType>(from.data, from.offset + depth * from.depth_stride,
                         first_lanes(from.rows));
    };
    return {row_of(i), row_of(i + kLanes)};
  }
}

// Pairs of numbers change places.
void transpose(const uint16_t* from, uint16_t* to) {
  at::vec::transpose_mxn<float, kTileRows, kTileRows>(
      reinterpret_cast<const float*>(from), kTileRows,
      reinterpret_cast<float*>(to), kTileRows);
}

template <DType kType, int kParts, bool kDepthInner, bool kTransposed,
          bool kEdge, typename Splitter>
void pack_tile(const Corner& from, Splitter& splitter, uint16_t* out) {
  constexpr int64_t kPart = 2 * kTileNumbers;
  alignas(64) std::array<uint16_t, static_cast<size_t>(kParts * kPart)> buffer;
  uint16_t* to = kTransposed ? buffer.data() : out;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTileRows; ++i) {
    const Numbers numbers = kEdge ? read_edge<kType, kDepthInner>(from, i)
                                  : read<kType, kDepthInner>(from, i);
    Parts<kParts> parts;
    splitter.split(numbers, parts);
#pragma GCC unroll 3
    for (int64_t part = 0; part < kParts; ++part) {
      _mm512_store_si512(to + part * kPart + i * kStepDepth, parts.of[part]);
    }
  }
  if constexpr (!kTransposed) return;
  for (int64_t part = 0; part < kParts; ++part) {
    transpose(to + part * kPart, out + part * kPart);
  }
}

template <DType kType, int kParts, bool kBounded, bool kDepthInner,
          bool kTransposed>
uint32_t pack_block(const PartSource& source, const PartBlock& block) {
  Splitter<kParts, kBounded> splitter;
  uint16_t* out = block.out;
  for (int64_t step = 0; step < block.num_steps; ++step) {
    const int64_t depth = block.first_depth + step * kStepDepth;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t row = block.first_row + half * kTileRows;
      if (row >= source.rows) break;
      const Corner from{
          .data = source.data,
          .offset = row * source.row_stride + depth * source.depth_stride,
          .row_stride = source.row_stride,
          .depth_stride = source.depth_stride,
          .rows = source.rows - row,
          .depth = source.depth - depth};
      uint16_t* tile = out + half * kTileNumbers;
      if (from.rows >= kTileRows && from.depth >= kStepDepth) {
        pack_tile<kType, kParts, kDepthInner, kTransposed, false>(
            from, splitter, tile);
      } else {
        pack_tile<kType, kParts, kDepthInner, kTransposed, true>(from, splitter,
                                                                 tile);
      }
    }
    out += 2 * kParts * kTileNumbers;
  }
  return splitter.largest();
}

template <DType kType, int kParts, bool kBounded, TileOrder kOrder>
uint32_t pack(const PartSource& source, const PartBlock& block) {
  constexpr bool kByRows = kOrder == TileOrder::kRows;
  return source.depth_stride == 1
             ? pack_block<kType, kParts, kBounded, true, !kByRows>(source,
                                                                   block)
             : pack_block<kType, kParts, kBounded, false, kByRows>(source,
                                                                   block);
}

template <DType kType, int kParts, bool kBounded>
PackFunction function_for(TileOrder order) {
  return order == TileOrder::kRows
             ? pack<kType, kParts, kBounded, TileOrder::kRows>
             : pack<kType, kParts, kBounded, TileOrder::kPairs>;
}

template <DType kType, int kParts>
PackFunction function_for(TileOrder order, bool bounded) {
  return bounded ? function_for<kType, kParts, true>(order)
                 : function_for<kType, kParts, false>(order);
}

// float32 numbers may be wide, or those of a narrower type.
PackFunction float32_function(int num_parts, TileOrder order, bool bounded) {
  switch (num_parts) {
    case 1:
      return function_for<DType::kFloat32, 1>(order, bounded);
    case 2:
      return function_for<DType::kFloat32, 2>(order, bounded);
    default:
      return function_for<DType::kFloat32, 3>(order, bounded);
  }
}

__m512 position(const PositionRow& row, int64_t i, __mmask16 lanes) {
  if (i < row.first || i >= row.last) return _mm512_setzero_ps();
  return load<DType::kFloat32>(row.data, row.offset + i * row.stride, lanes);
}

template <int kParts>
uint32_t pack_row(const PositionRow& low, const PositionRow& high,
                  int64_t count, uint16_t* out, int64_t part) {
  Splitter<kParts, /*kBounded=*/false> splitter;
  const __mmask16 low_lanes = first_lanes(low.lanes);
  const __mmask16 high_lanes = first_lanes(high.lanes);
  for (int64_t i = 0; i < count; ++i) {
    Parts<kParts> parts;
    splitter.split({position(low, i, low_lanes), position(high, i, high_lanes)},
                   parts);
#pragma GCC unroll 3
    for (int64_t p = 0; p < kParts; ++p) {
      _mm512_store_si512(out + p * part + i * kStepDepth, parts.of[p]);
    }
  }
  return splitter.largest();
}

}  // namespace

PackRowFunction pack_row_function(int num_parts) {
  switch (num_parts) {
    case 1:
      return pack_row<1>;
    case 2:
      return pack_row<2>;
    default:
      return pack_row<3>;
  }
}

void transpose_tile(const uint16_t* from, uint16_t* to) { transpose(from, to); }

PackFunction pack_function(DType dtype, int num_parts, TileOrder order,
                           bool bounded) {
  switch (dtype) {
    case DType::kFloat32:
      return float32_function(num_parts, order, bounded);
    case DType::kFloat16:
      return function_for<DType::kFloat16, 2>(order, bounded);
    case DType::kBFloat16:
      return function_for<DType::kBFloat16, 1>(order, bounded);
    default:
      throw InternalError(join("pack_function: ", name_of(dtype)));
  }
}

}  // namespace popsim::dense

#else

namespace popsim::dense {

PackFunction pack_function(DType /*dtype*/, int /*num_parts*/,
                           TileOrder /*order*/, bool /*bounded*/) {
  throw InternalError("pack_function: not built for matrix units");
}

PackRowFunction pack_row_function(int /*num_parts*/) {
  throw InternalError("pack_row_function: not built for matrix units");
}

void transpose_tile(const uint16_t* /*from*/, uint16_t* /*to*/) {
  throw InternalError("transpose_tile: not built for matrix units");
}

}  // namespace popsim::dense
#endif
