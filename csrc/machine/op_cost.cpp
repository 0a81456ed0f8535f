#include "machine/op_cost.h"

#include <algorithm>

namespace popsim::machine {

OpCost& OpCost::operator+=(const OpCost& next) {
  compute += next.compute;
  exchange += next.exchange;
  sync += next.sync;
  glue += next.glue;
  temporary_bytes = std::max(temporary_bytes, next.temporary_bytes);
  exchanges = exchanges || next.exchanges;
  grade = worse(grade, next.grade);
  if (formula.empty()) formula = next.formula;
  if (plan.empty()) plan = next.plan;
  return *this;
}

OpCost& OpCost::operator*=(double times) {
  compute *= times;
  exchange *= times;
  sync *= times;
  glue *= times;
  return *this;
}

}  // namespace popsim::machine
