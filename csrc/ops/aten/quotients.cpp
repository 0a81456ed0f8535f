#include "ops/aten/quotients.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>

#include <limits>

#include "base/check.h"

namespace popsim::ops {
namespace {

constexpr const char* kQuotient = "aten::div";
constexpr const char* kMultiple = "aten::lcm";

at::Tensor operand(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  return at::native::wrapped_scalar_tensor(value.toScalar());
}

// PyTorch divides shorter integers as int32.
int64_t least(at::ScalarType type) {
  if (type == at::kLong) return std::numeric_limits<int64_t>::min();
  return std::numeric_limits<int32_t>::min();
}

// The divisor of the first operand: lcm(a, b) is a / gcd(a, b) * b, and the
// divisor that PyTorch computes for the least number may be -1.
at::Tensor divisor(const std::string& name, const at::Tensor& a,
                   const at::Tensor& b, at::ScalarType type) {
  if (name == kQuotient) return b;
  return at::gcd(a.to(type), b.to(type));
}

}  // namespace

bool may_overflow_quotients(const std::string& name) {
  return name == kQuotient || name == kMultiple;
}

void check_quotients(const std::string& name,
                     const std::vector<c10::IValue>& arguments) {
  // Other quotients are fractions, or rounded down by code that does not trap.
  if (name == kQuotient && (arguments.size() < 3 || !arguments[2].isString() ||
                            arguments[2].toStringRef() != "trunc")) {
    return;
  }
  const at::Tensor a = operand(arguments[0]);
  const at::Tensor b = operand(arguments[1]);
  const auto type = at::result_type(a, b);
  if (type != at::kInt && type != at::kLong) return;
  const at::Tensor smallest = a.eq(least(type));
  if (!smallest.any().item<bool>()) return;
  const at::Tensor over =
      smallest.logical_and(divisor(name, a, b, type).eq(-1));
  if (!over.any().item<bool>()) return;
  throw UserError(join(name, ": the quotient of ", least(type),
                       " and -1 is too large for ",
                       type == at::kLong ? "int64" : "int32",
                       "; eager PyTorch ends the process here"));
}

}  // namespace popsim::ops
