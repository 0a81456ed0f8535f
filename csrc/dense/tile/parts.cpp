#include "dense/tile/parts.h"

#include <array>

#include "base/check.h"
#include "dense/tile/lanes.h"

// GCC 12 warns of uninitialised values in its own AVX-512 headers.
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace popsim::dense {
namespace {

// 32 numbers, in pairs that are adjacent in a tile's row: the depth of a step
// has the order 0, 16, 1, 17, ...
struct Numbers {
  Floats low;
  Floats high;
};

Floats upper_halves(const Bits& bits) {
  return floats_of(both(bits, all_lanes(0xffff0000U)));
}

// The nearest bfloat16 numbers, stored as float32.
Floats rounded(const Floats& numbers) {
  return upper_halves(plus(bits_of(numbers), all_lanes(0x8000U)));
}

// Converts bfloat16 numbers that are stored as float32.
Bits joined(const Numbers& numbers) {
  return either(upper_half_below(bits_of(numbers.low)), bits_of(numbers.high));
}

template <int kParts>
struct Parts {
  Bits of[kParts];
};

// Computes the parts of 32 numbers at a time.
template <DType kType, int kParts>
class Splitter {
 public:
  void split(Numbers numbers, Parts<kParts>& parts) {
    squares_ = {plus_square(squares_.low, numbers.low),
                plus_square(squares_.high, numbers.high)};
    if constexpr (kScale != 1.0F) {
      numbers = {times(numbers.low, kScale), times(numbers.high, kScale)};
    }
#pragma GCC unroll 2
    for (int part = 0; part + 1 < kParts; ++part) {
      const Numbers near{rounded(numbers.low), rounded(numbers.high)};
      numbers = {minus(numbers.low, near.low), minus(numbers.high, near.high)};
      parts.of[part] = joined(near);
    }
    if constexpr (kRounds) {
      numbers = {rounded(numbers.low), rounded(numbers.high)};
    }
    // The remainder has no more significant bits than a bfloat16.
    parts.of[kParts - 1] =
        joined({numbers.low, upper_halves(bits_of(numbers.high))});
  }

  // The sum of the squares, as PackFunction returns it.
  [[nodiscard]] float squares() const {
    return sum_of(squares_.low) + sum_of(squares_.high);
  }

 private:
  static constexpr float kScale = packed_scale(kType);
  // Fewer than three parts do not represent every float32.
  static constexpr bool kRounds = kType == DType::kFloat32 && kParts < 3;

  // It is not zero, so that no sum is so small that the processor becomes slow.
  static constexpr float kNothing = 0x1p-60F;
  Numbers squares_{all_lanes(kNothing), all_lanes(kNothing)};
};

// The place of the first number of a tile, and how much of the matrix remains
// from there.
struct Corner {
  const void* data;
  int64_t offset;
  int64_t row_stride;
  int64_t depth_stride;
  int64_t rows;
  int64_t depth;
};

// Loads numbers i of a tile: a row of the tile if the depth has stride 1,
// otherwise two positions of the depth from all its rows.
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
    if (i >= from.rows) return {zeros(), zeros()};
    const int64_t at = from.offset + i * from.row_stride;
    return {
        load<kType>(from.data, at, first_lanes(from.depth)),
        load<kType>(from.data, at + kLanes, first_lanes(from.depth - kLanes))};
  } else {
    const auto row_of = [&](int64_t depth) {
      if (depth >= from.depth) return zeros();
      return load<kType>(from.data, from.offset + depth * from.depth_stride,
                         first_lanes(from.rows));
    };
    return {row_of(i), row_of(i + kLanes)};
  }
}

// Transposes a tile of pairs of numbers.
void transpose(const uint16_t* from, uint16_t* to) {
  at::vec::transpose_mxn<float, kTileRows, kTileRows>(
      reinterpret_cast<const float*>(from), kTileRows,
      reinterpret_cast<float*>(to), kTileRows);
}

template <DType kType, int kParts, bool kDepthInner, bool kTransposed,
          bool kEdge, typename Splitter>
void pack_tile(const Corner& from, Splitter& so_far, uint16_t* out) {
  constexpr int64_t kPart = 2 * kTileNumbers;
  alignas(64) std::array<uint16_t, static_cast<size_t>(kParts * kPart)> buffer;
  uint16_t* to = kTransposed ? buffer.data() : out;
  Splitter splitter = so_far;  // in registers
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTileRows; ++i) {
    const Numbers numbers = kEdge ? read_edge<kType, kDepthInner>(from, i)
                                  : read<kType, kDepthInner>(from, i);
    Parts<kParts> parts;
    splitter.split(numbers, parts);
#pragma GCC unroll 3
    for (int64_t part = 0; part < kParts; ++part) {
      store(to + part * kPart + i * kStepDepth, parts.of[part]);
    }
  }
  so_far = splitter;
  if constexpr (!kTransposed) return;
  for (int64_t part = 0; part < kParts; ++part) {
    transpose(to + part * kPart, out + part * kPart);
  }
}

template <DType kType, int kParts, bool kDepthInner, bool kTransposed>
float pack_block(const PartSource& source, const PartBlock& block) {
  Splitter<kType, kParts> splitter;
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
  return splitter.squares();
}

template <DType kType, int kParts, TileOrder kOrder>
float pack(const PartSource& source, const PartBlock& block) {
  constexpr bool kByRows = kOrder == TileOrder::kRows;
  return source.depth_stride == 1
             ? pack_block<kType, kParts, true, !kByRows>(source, block)
             : pack_block<kType, kParts, false, kByRows>(source, block);
}

template <DType kType, int kParts>
PackFunction function_for(TileOrder order) {
  return order == TileOrder::kRows ? pack<kType, kParts, TileOrder::kRows>
                                   : pack<kType, kParts, TileOrder::kPairs>;
}

// float32 numbers may use all their bits, be rounded to fewer, or be numbers of
// a narrower dtype.
PackFunction float32_function(int num_parts, TileOrder order) {
  switch (num_parts) {
    case 1:
      return function_for<DType::kFloat32, 1>(order);
    case 2:
      return function_for<DType::kFloat32, 2>(order);
    default:
      return function_for<DType::kFloat32, 3>(order);
  }
}

Floats position(const PositionRow& row, int64_t i, Lanes lanes) {
  if (i < row.first || i >= row.last) return zeros();
  return load<DType::kFloat32>(row.data, row.offset + i * row.stride, lanes);
}

template <int kParts>
float pack_row(const PositionRow& low, const PositionRow& high, int64_t count,
               uint16_t* out, int64_t part) {
  Splitter<DType::kFloat32, kParts> splitter;
  const Lanes low_lanes = first_lanes(low.lanes);
  const Lanes high_lanes = first_lanes(high.lanes);
  for (int64_t i = 0; i < count; ++i) {
    Parts<kParts> parts;
    splitter.split({position(low, i, low_lanes), position(high, i, high_lanes)},
                   parts);
#pragma GCC unroll 3
    for (int64_t p = 0; p < kParts; ++p) {
      store(out + p * part + i * kStepDepth, parts.of[p]);
    }
  }
  return splitter.squares();
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

PackFunction pack_function(DType dtype, int num_parts, TileOrder order) {
  switch (dtype) {
    case DType::kFloat32:
      return float32_function(num_parts, order);
    case DType::kFloat16:
      return function_for<DType::kFloat16, 2>(order);
    case DType::kBFloat16:
      return function_for<DType::kBFloat16, 1>(order);
    default:
      throw InternalError(join("pack_function: ", name_of(dtype)));
  }
}

}  // namespace popsim::dense
