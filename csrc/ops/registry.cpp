// Every op of the device, one line each. The entries stand beside the kernels.
#include <array>
#include <unordered_map>

#include "ops/op_def.h"

namespace popsim::ops {

// Each line declares an entry of this namespace and lists it.
// clang-format off
const std::array kOps{
    [] { extern const OpDef kAccumulate; return &kAccumulate; }(),
    [] { extern const OpDef kAdamUpdate; return &kAdamUpdate; }(),
    [] { extern const OpDef kAnchor; return &kAnchor; }(),
    [] { extern const OpDef kAten; return &kAten; }(),
    [] { extern const OpDef kAttention; return &kAttention; }(),
    [] { extern const OpDef kAttentionGrad; return &kAttentionGrad; }(),
    [] { extern const OpDef kAveragePool; return &kAveragePool; }(),
    [] { extern const OpDef kAveragePoolGrad; return &kAveragePoolGrad; }(),
    [] { extern const OpDef kBatchNormGrad; return &kBatchNormGrad; }(),
    [] { extern const OpDef kBatchNormStatistics; return &kBatchNormStatistics; }(),
    [] { extern const OpDef kCat; return &kCat; }(),
    [] { extern const OpDef kConvolution; return &kConvolution; }(),
    [] { extern const OpDef kConvolutionGradInput; return &kConvolutionGradInput; }(),
    [] { extern const OpDef kConvolutionGradWeight; return &kConvolutionGradWeight; }(),
    [] { extern const OpDef kCopy; return &kCopy; }(),
    [] { extern const OpDef kCrossEntropyGrad; return &kCrossEntropyGrad; }(),
    [] { extern const OpDef kCumsum; return &kCumsum; }(),
    [] { extern const OpDef kEmbedding; return &kEmbedding; }(),
    [] { extern const OpDef kEmbeddingGrad; return &kEmbeddingGrad; }(),
    [] { extern const OpDef kGradientNorm; return &kGradientNorm; }(),
    [] { extern const OpDef kGroupNorm; return &kGroupNorm; }(),
    [] { extern const OpDef kGroupNormGrad; return &kGroupNormGrad; }(),
    [] { extern const OpDef kIntoZeros; return &kIntoZeros; }(),
    [] { extern const OpDef kLambUpdate; return &kLambUpdate; }(),
    [] { extern const OpDef kLayerNorm; return &kLayerNorm; }(),
    [] { extern const OpDef kLayerNormGrad; return &kLayerNormGrad; }(),
    [] { extern const OpDef kMap; return &kMap; }(),
    [] { extern const OpDef kMatmul; return &kMatmul; }(),
    [] { extern const OpDef kMaxPool; return &kMaxPool; }(),
    [] { extern const OpDef kMaxPoolGrad; return &kMaxPoolGrad; }(),
    [] { extern const OpDef kNllLoss; return &kNllLoss; }(),
    [] { extern const OpDef kNllLossGrad; return &kNllLossGrad; }(),
    [] { extern const OpDef kPrint; return &kPrint; }(),
    [] { extern const OpDef kRandom; return &kRandom; }(),
    [] { extern const OpDef kRecurrent; return &kRecurrent; }(),
    [] { extern const OpDef kRecurrentGrad; return &kRecurrentGrad; }(),
    [] { extern const OpDef kReduce; return &kReduce; }(),
    [] { extern const OpDef kRmspropUpdate; return &kRmspropUpdate; }(),
    [] { extern const OpDef kSgdCombinedAccumulate; return &kSgdCombinedAccumulate; }(),
    [] { extern const OpDef kSgdCombinedUpdate; return &kSgdCombinedUpdate; }(),
    [] { extern const OpDef kSgdMomentumUpdate; return &kSgdMomentumUpdate; }(),
    [] { extern const OpDef kSgdProductUpdate; return &kSgdProductUpdate; }(),
    [] { extern const OpDef kSgdUpdate; return &kSgdUpdate; }(),
    [] { extern const OpDef kSoftmax; return &kSoftmax; }(),
    [] { extern const OpDef kSoftmaxGrad; return &kSoftmaxGrad; }(),
};
// clang-format on

namespace {

struct Entry {
  const OpDef* def;
  Schema schema;
};

std::unordered_map<std::string_view, Entry> read_entries() {
  std::unordered_map<std::string_view, Entry> entries;
  for (const OpDef* op : kOps) {
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

std::span<const OpDef* const> all_ops() { return kOps; }

}  // namespace popsim::ops
