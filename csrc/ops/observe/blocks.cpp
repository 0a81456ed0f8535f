#include "ops/observe/blocks.h"

#include <algorithm>

#include "base/check.h"
#include "base/numbers.h"
#include "dense/vector/transpose.h"

namespace popsim::ops::observe {
namespace {

constexpr int64_t kSide = 16;  // of a square that is transposed at once

// `upper` may be null.
using LoadBits = void (*)(const void* source, int64_t offset, int64_t stride,
                          int64_t count, uint32_t* lower, uint32_t* upper);

template <typename T>
void load_doubles(const void* source, int64_t offset, int64_t stride,
                  int64_t count, double* out) {
  const T* first = static_cast<const T*>(source) + offset;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<double>(first[i * stride]);
  }
}

template <typename T>
void load_bits(const void* source, int64_t offset, int64_t stride,
               int64_t count, uint32_t* lower, uint32_t* upper) {
  const T* first = static_cast<const T*>(source) + offset;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<int64_t>(first[i * stride]);
    lower[i] = static_cast<uint32_t>(value);
    if (upper != nullptr) {
      const auto extended = static_cast<int64_t>(static_cast<int32_t>(value));
      upper[i] = static_cast<uint32_t>((value ^ extended) >> 32);
    }
  }
}

LoadBits bits_of(DType dtype) {
  return dtype == DType::kInt64 ? load_bits<int64_t> : load_bits<int32_t>;
}

}  // namespace

LoadDoubles doubles_of(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
      return load_doubles<int32_t>;
    case DType::kInt64:
      return load_doubles<int64_t>;
    case DType::kFloat64:
      return load_doubles<double>;
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
      return nullptr;
    case DType::kComplex64:
      break;
  }
  throw InternalError("statistics: not a dtype of real numbers");
}

BlockReader::BlockReader(const OpView& op, bool bits, bool positions)
    : id_(op.input_id(0)),
      dtype_(op.input(0).dtype),
      numel_(op.input(0).numel()),
      load_floats_(load_floats(dtype_)),
      floats_(op, 0),
      walk_(op.input(0).shape, op.input(0).strides),
      is_exact_(doubles_of(dtype_) == nullptr),
      bits_(bits && !is_floating(dtype_)),
      positions_(positions) {
  if (is_exact_ && numel_ > 0) {
    tiles_ = Tiles::of(op.input(0).shape, op.input(0).strides, positions_);
  }
}

int64_t BlockReader::num_blocks() const {
  return tiles_ ? tiles_->count() : ceil_div(numel_, kBlock);
}

BlockMemory BlockReader::memory() const {
  BlockMemory memory;
  memory.segments.resize(tiles_ ? kBlock : 1);
  if (!floats_.in_place()) memory.floats.resize(kBlock);
  if (tiles_ && positions_) memory.columns.resize(kBlock);
  if (!is_exact_) memory.exact.resize(kBlock);
  if (bits_) memory.lower.resize(kBlock);
  if (bits_ && dtype_ == DType::kInt64) memory.upper.resize(kBlock);
  return memory;
}

Block BlockReader::read(const RunContext& context, int64_t index,
                        BlockMemory& memory) const {
  if (tiles_) return read_tile(context, index, memory);
  const int64_t first = index * kBlock;
  const int64_t count = std::min(kBlock, numel_ - first);
  memory.segments[0] = {first, 0, count};
  Block block{count, memory.segments};
  if (!is_exact_) {
    read_exact(context, first, block, memory);
    return block;
  }
  block.floats = floats_.read(context, first, count, memory.floats.data());
  add_bits(block, memory);
  return block;
}

Block BlockReader::read_tile(const RunContext& context, int64_t index,
                             BlockMemory& memory) const {
  const Tile tile = (*tiles_)[index];
  Block block{tile.rows * tile.columns};
  block.in_order = false;
  block.floats = memory.floats.data();
  if (!positions_) {
    read_columns(context, tile, 0, tile.columns, memory.floats.data());
  } else {
    read_rows(context, tile, memory);
    block.segments = std::span<const Segment>(memory.segments)
                         .first(static_cast<size_t>(tile.rows));
  }
  add_bits(block, memory);
  return block;
}

// Reads columns, one after the other.
void BlockReader::read_columns(const RunContext& context, const Tile& tile,
                               int64_t first, int64_t count, float* out) const {
  for (int64_t column = first; column < first + count; ++column) {
    load_floats_(context.data(id_),
                 tile.offset + column * tiles_->column_stride(), 1, tile.rows,
                 out);
    out += tile.rows;
  }
}

// Reads rows, one after the other: transposes some columns at a time.
void BlockReader::read_rows(const RunContext& context, const Tile& tile,
                            BlockMemory& memory) const {
  for (int64_t column = 0; column < tile.columns; column += kSide) {
    const int64_t columns = std::min(kSide, tile.columns - column);
    const float* from = memory.columns.data();
    int64_t stride = tile.rows;
    if (dtype_ == DType::kFloat32) {
      stride = tiles_->column_stride();
      from = context.data<const float>(id_) + tile.offset + column * stride;
    } else {
      read_columns(context, tile, column, columns, memory.columns.data());
    }
    for (int64_t row = 0; row < tile.rows; row += kSide) {
      dense::transpose_block<kSide>(
          from + row, stride,
          memory.floats.data() + row * tile.columns + column, tile.columns,
          columns, std::min(kSide, tile.rows - row));
    }
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    memory.segments[static_cast<size_t>(row)] = {
        tile.position + row * tiles_->row_step(), row * tile.columns,
        tile.columns};
  }
}

// Float32 has these integers.
void BlockReader::add_bits(Block& block, BlockMemory& memory) const {
  if (!bits_) return;
  for (int64_t i = 0; i < block.count; ++i) {
    memory.lower[static_cast<size_t>(i)] =
        static_cast<uint32_t>(static_cast<int32_t>(block.floats[i]));
  }
  block.lower = memory.lower.data();
}

void BlockReader::read_exact(const RunContext& context, int64_t first,
                             Block& block, BlockMemory& memory) const {
  const void* source = context.data(id_);
  const LoadDoubles load = doubles_of(dtype_);
  uint32_t* lower = bits_ ? memory.lower.data() : nullptr;
  uint32_t* upper = memory.upper.empty() ? nullptr : memory.upper.data();
  int64_t done = 0;
  walk_.for_each_run(
      first, block.count, [&](int64_t offset, int64_t stride, int64_t run) {
        load(source, offset, stride, run, memory.exact.data() + done);
        if (bits_) {
          bits_of(dtype_)(source, offset, stride, run, lower + done,
                          upper == nullptr ? nullptr : upper + done);
        }
        done += run;
      });
  for (size_t i = 0; i < static_cast<size_t>(block.count); ++i) {
    memory.floats[i] = static_cast<float>(memory.exact[i]);
  }
  block.floats = memory.floats.data();
  block.exact = memory.exact.data();
  block.lower = lower;
  block.upper = upper;
}

double BlockReader::value(const RunContext& context, int64_t position) const {
  if (is_exact_) {
    float scratch;
    return static_cast<double>(*floats_.read(context, position, 1, &scratch));
  }
  double value;
  doubles_of(dtype_)(context.data(id_), walk_.offset_of(position), 1, 1,
                     &value);
  return value;
}

}  // namespace popsim::ops::observe
