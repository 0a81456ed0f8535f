#include "ops/observe/blocks.h"

#include "base/check.h"

namespace popsim::ops::observe {
namespace {

using LoadDoubles = void (*)(const void* source, int64_t offset, int64_t stride,
                             int64_t count, double* out);
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

// Null if float32 has all values of the dtype.
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
  }
  throw InternalError("statistics: an unknown dtype");
}

LoadBits bits_of(DType dtype) {
  return dtype == DType::kInt64 ? load_bits<int64_t> : load_bits<int32_t>;
}

}  // namespace

BlockReader::BlockReader(const OpView& op, bool bits)
    : id_(op.input_id(0)),
      dtype_(op.input(0).dtype),
      floats_(op, 0),
      walk_(op.input(0).shape, op.input(0).strides),
      is_exact_(doubles_of(dtype_) == nullptr),
      bits_(bits && !is_floating(dtype_)) {}

BlockMemory BlockReader::memory() const {
  BlockMemory memory;
  if (!floats_.in_place()) memory.floats.resize(kBlock);
  if (!is_exact_) memory.exact.resize(kBlock);
  if (bits_) memory.lower.resize(kBlock);
  if (bits_ && dtype_ == DType::kInt64) memory.upper.resize(kBlock);
  return memory;
}

Block BlockReader::read(const RunContext& context, int64_t first, int64_t count,
                        BlockMemory& memory) const {
  Block block{first, count};
  if (is_exact_) {
    block.floats = floats_.read(context, first, count, memory.floats.data());
  } else {
    double* out = memory.exact.data();
    walk_.for_each_run(
        first, count, [&](int64_t offset, int64_t stride, int64_t run) {
          doubles_of(dtype_)(context.data(id_), offset, stride, run, out);
          out += run;
        });
    block.exact = memory.exact.data();
    for (int64_t i = 0; i < count; ++i) {
      memory.floats[static_cast<size_t>(i)] =
          static_cast<float>(block.exact[i]);
    }
    block.floats = memory.floats.data();
  }
  if (!bits_) return block;
  block.lower = memory.lower.data();
  if (is_exact_) {
    for (int64_t i = 0; i < count; ++i) {
      memory.lower[static_cast<size_t>(i)] =
          static_cast<uint32_t>(static_cast<int32_t>(block.floats[i]));
    }
    return block;
  }
  int64_t done = 0;
  uint32_t* upper = memory.upper.empty() ? nullptr : memory.upper.data();
  walk_.for_each_run(
      first, count, [&](int64_t offset, int64_t stride, int64_t run) {
        bits_of(dtype_)(context.data(id_), offset, stride, run,
                        memory.lower.data() + done,
                        upper == nullptr ? nullptr : upper + done);
        done += run;
      });
  block.upper = upper;
  return block;
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
