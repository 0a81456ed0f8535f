#include "ops/operands/aten_types.h"

#include <array>
#include <utility>

#include "base/check.h"

namespace popsim::ops {
namespace {

constexpr std::array<std::pair<DType, at::ScalarType>, 11> kTypes{{
    {DType::kBool, at::ScalarType::Bool},
    {DType::kUInt8, at::ScalarType::Byte},
    {DType::kInt8, at::ScalarType::Char},
    {DType::kInt16, at::ScalarType::Short},
    {DType::kInt32, at::ScalarType::Int},
    {DType::kInt64, at::ScalarType::Long},
    {DType::kFloat16, at::ScalarType::Half},
    {DType::kBFloat16, at::ScalarType::BFloat16},
    {DType::kFloat32, at::ScalarType::Float},
    {DType::kFloat64, at::ScalarType::Double},
    {DType::kComplex64, at::ScalarType::ComplexFloat},
}};

}  // namespace

at::ScalarType to_scalar_type(DType dtype) {
  return kTypes.at(static_cast<size_t>(dtype)).second;
}

DType from_scalar_type(at::ScalarType type) {
  for (const auto& [dtype, scalar_type] : kTypes) {
    if (scalar_type == type) return dtype;
  }
  throw UserError(join("the device has no dtype ", toString(type)));
}

}  // namespace popsim::ops
