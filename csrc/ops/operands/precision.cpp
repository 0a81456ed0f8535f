#include "ops/operands/precision.h"

#include <string>

#include "base/dtype.h"

namespace popsim::ops {
namespace {

constexpr const char* kPrecision = "precision";

}  // namespace

int significant_bits_in(const OpCall& op, DType dtype) {
  if (dtype != DType::kFloat32 || !op.has_attribute(kPrecision)) {
    return significant_bits(dtype);
  }
  return op.attribute<std::string>(kPrecision) == "bf16" ? 8 : 16;
}

void check_precision(const OpCall& op) {
  if (!op.has_attribute(kPrecision)) return;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    if (op.has_input(i) && op.input(i).dtype == DType::kFloat32) return;
  }
  op.require(false, "precision is for float32 operands");
}

}  // namespace popsim::ops
