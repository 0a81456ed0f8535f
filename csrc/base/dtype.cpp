#include "base/dtype.h"

#include <array>
#include <utility>

#include "base/check.h"

namespace popsim {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<Row, 11> kRows{{
    {DType::kBool, "bool", 1},
    {DType::kUInt8, "uint8", 1},
    {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kFloat16, "float16", 2},
    {DType::kBFloat16, "bfloat16", 2},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
    {DType::kComplex64, "complex64", 8},
}};

}  // namespace

int64_t size_in_bytes(DType dtype) {
  return kRows.at(static_cast<size_t>(dtype)).bytes;
}

std::string_view name_of(DType dtype) {
  return kRows.at(static_cast<size_t>(dtype)).name;
}

DType dtype_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  throw UserError(join("'", name, "' is not a dtype of the device"));
}

bool is_floating(DType dtype) {
  return dtype >= DType::kFloat16 && dtype <= DType::kFloat64;
}

bool is_complex(DType dtype) { return dtype == DType::kComplex64; }

bool is_inexact(DType dtype) { return is_floating(dtype) || is_complex(dtype); }

bool can_view(DType memory, DType as) {
  if (memory == as) return true;
  return (is_complex(memory) && as == DType::kFloat32) ||
         (memory == DType::kFloat32 && is_complex(as));
}

}  // namespace popsim
