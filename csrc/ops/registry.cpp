// Every op of the device, listed one by one.
#include <array>

#include "ops/entries.h"

namespace popsim::ops {

namespace {

constexpr std::array<const OpDef*, 44> kOps{
    &kAccumulate,
    &kAdamUpdate,
    &kAnchor,
    &kAten,
    &kAttention,
    &kAttentionGrad,
    &kAveragePool,
    &kAveragePoolGrad,
    &kBatchNormGrad,
    &kBatchNormStatistics,
    &kCat,
    &kConvolution,
    &kConvolutionGradInput,
    &kConvolutionGradWeight,
    &kCopy,
    &kCrossEntropyGrad,
    &kEmbedding,
    &kEmbeddingGrad,
    &kGradientNorm,
    &kGroupNorm,
    &kGroupNormGrad,
    &kIntoZeros,
    &kLambUpdate,
    &kLayerNorm,
    &kLayerNormGrad,
    &kMap,
    &kMatmul,
    &kMaxPool,
    &kMaxPoolGrad,
    &kNllLoss,
    &kNllLossGrad,
    &kPrint,
    &kRandom,
    &kRecurrent,
    &kRecurrentGrad,
    &kReduce,
    &kRmspropUpdate,
    &kSgdCombinedAccumulate,
    &kSgdCombinedUpdate,
    &kSgdMomentumUpdate,
    &kSgdProductUpdate,
    &kSgdUpdate,
    &kSoftmax,
    &kSoftmaxGrad,
};

}  // namespace

const OpDef& find_op(std::string_view name) {
  for (const OpDef* op : kOps) {
    if (op->name == name) return *op;
  }
  throw InternalError(join("no op named '", name, "' in the registry"));
}

std::span<const OpDef* const> all_ops() { return kOps; }

}  // namespace popsim::ops
