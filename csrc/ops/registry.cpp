// Every op of the device, by name.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <unordered_map>

#include "ops/kernels.h"
#include "ops/listed.h"
#include "ops/op_def.h"
#include "processor/built_targets.h"
#include "processor/target.h"

// Declares the targets of this build (setup.py).
#define POPSIM_DECLARE(target) \
  extern "C" const popsim::ops::Kernels* popsim_kernels_##target();
POPSIM_FOR_EACH_TARGET(POPSIM_DECLARE)
#undef POPSIM_DECLARE

namespace popsim::ops {

// The ops that are compiled only once. All other ops are in kernels.cpp.
const std::array kCommonOps{POPSIM_COMMON_OPS(POPSIM_LIST_OP)};

namespace {

// The name of a target's group of objects: the matrix units use those of
// AVX-512.
std::string_view group_of(processor::Target target) {
  return processor::name_of(
      target == processor::Target::kAmx ? processor::Target::kAvx512 : target);
}

const Kernels& kernels_of(processor::Target target) {
#define POPSIM_RETURN(group) \
  if (group_of(target) == #group) return *popsim_kernels_##group();
  POPSIM_FOR_EACH_TARGET(POPSIM_RETURN)
#undef POPSIM_RETURN
  check_internal(false, "no kernels for ", processor::name_of(target));
  std::abort();
}

std::vector<const OpDef*> list_ops() {
  std::vector<const OpDef*> ops(kCommonOps.begin(), kCommonOps.end());
  const std::span<const OpDef* const> of_target = kernels().ops;
  ops.insert(ops.end(), of_target.begin(), of_target.end());
  std::ranges::sort(ops, {}, &OpDef::name);
  return ops;
}

struct Entry {
  const OpDef* def;
  Schema schema;
};

std::unordered_map<std::string_view, Entry> read_entries() {
  std::unordered_map<std::string_view, Entry> entries;
  for (const OpDef* op : all_ops()) {
    Schema schema = parse_schema(op->schema);
    check_internal(schema.name == op->name, "the schema of '", op->name,
                   "' begins with another name");
    const bool is_new = entries.emplace(op->name, Entry{op, schema}).second;
    check_internal(is_new, "two ops are named '", op->name, "'");
  }
  return entries;
}

const Entry& find_entry(std::string_view name) {
  static const auto entries = read_entries();
  const auto found = entries.find(name);
  check_internal(found != entries.end(), "no op named '", name,
                 "' in the registry");
  return found->second;
}

}  // namespace

const OpDef& find_op(std::string_view name) { return *find_entry(name).def; }

const Schema& find_schema(std::string_view name) {
  return find_entry(name).schema;
}

std::span<const OpDef* const> all_ops() {
  static const std::vector<const OpDef*> ops = list_ops();
  return ops;
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    processor::keep_target();
    return kernels_of(processor::target());
  }();
  return chosen;
}

}  // namespace popsim::ops
