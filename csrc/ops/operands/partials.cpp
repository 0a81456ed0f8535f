#include "ops/operands/partials.h"

namespace popsim::ops {

bool has_half_partials(const OpCall& op) {
  if (!op.has_attribute("partials")) return false;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    check_internal(!op.has_input(i) || op.input(i).dtype == DType::kFloat16,
                   op.op().kind, " '", op.op().name,
                   "': half partials are for float16 operands");
  }
  return true;
}

}  // namespace popsim::ops
