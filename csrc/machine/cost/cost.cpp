#include "machine/cost/cost.h"

#include <map>

#include "machine/cost/entries.h"

namespace popsim::machine {
namespace {

using Rules = std::map<std::string_view, CostRule, std::less<>>;

Rules all_rules() {
  Rules rules;
  for (const auto entries :
       {elementwise_costs(), reduction_costs(), layout_costs(), update_costs(),
        pool_costs(), other_costs(), matmul_costs(), convolution_costs(),
        recurrent_costs()}) {
    for (const CostEntry& entry : entries) rules[entry.kind] = entry.rule;
  }
  return rules;
}

}  // namespace

CostRule find_cost_rule(std::string_view kind) {
  static const Rules rules = all_rules();
  const auto found = rules.find(kind);
  return found == rules.end() ? nullptr : found->second;
}

OpCost cost_of(const ops::OpView& op, CostContext& context) {
  const CostRule rule = find_cost_rule(op.op().kind);
  if (rule != nullptr) return rule(op, context);
  OpCost none;
  none.grade = Grade::kNone;
  return none;
}

}  // namespace popsim::machine
