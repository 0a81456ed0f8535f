// Every op that has code for each target, one line each. The entries stand
// beside the kernels.
#include "ops/kernels.h"

#include <array>

#include "dense/matmul.h"
#include "dense/tile/units.h"

namespace popsim::ops {

// Each line declares an entry of this namespace and lists it.
// clang-format off
const std::array kOps{
    [] { extern const OpDef kAccumulate; return &kAccumulate; }(),
    [] { extern const OpDef kAdamUpdate; return &kAdamUpdate; }(),
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
    [] { extern const OpDef kCtcBeamSearch; return &kCtcBeamSearch; }(),
    [] { extern const OpDef kCtcLoss; return &kCtcLoss; }(),
    [] { extern const OpDef kCtcLossGrad; return &kCtcLossGrad; }(),
    [] { extern const OpDef kCumsum; return &kCumsum; }(),
    [] { extern const OpDef kDynamicSlice; return &kDynamicSlice; }(),
    [] { extern const OpDef kDynamicUpdate; return &kDynamicUpdate; }(),
    [] { extern const OpDef kEmbedding; return &kEmbedding; }(),
    [] { extern const OpDef kEmbeddingGrad; return &kEmbeddingGrad; }(),
    [] { extern const OpDef kFps; return &kFps; }(),
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
    [] { extern const OpDef kNearest; return &kNearest; }(),
    [] { extern const OpDef kNllLoss; return &kNllLoss; }(),
    [] { extern const OpDef kNllLossGrad; return &kNllLossGrad; }(),
    [] { extern const OpDef kRandom; return &kRandom; }(),
    [] { extern const OpDef kRecurrent; return &kRecurrent; }(),
    [] { extern const OpDef kRecurrentGrad; return &kRecurrentGrad; }(),
    [] { extern const OpDef kReduce; return &kReduce; }(),
    [] { extern const OpDef kRmspropUpdate; return &kRmspropUpdate; }(),
    [] { extern const OpDef kSerializedMatmul; return &kSerializedMatmul; }(),
    [] { extern const OpDef kSgdCombinedAccumulate; return &kSgdCombinedAccumulate; }(),
    [] { extern const OpDef kSgdCombinedUpdate; return &kSgdCombinedUpdate; }(),
    [] { extern const OpDef kSgdMomentumUpdate; return &kSgdMomentumUpdate; }(),
    [] { extern const OpDef kSgdProductUpdate; return &kSgdProductUpdate; }(),
    [] { extern const OpDef kSgdUpdate; return &kSgdUpdate; }(),
    [] { extern const OpDef kSoftmax; return &kSoftmax; }(),
    [] { extern const OpDef kSoftmaxGrad; return &kSoftmaxGrad; }(),
    [] { extern const OpDef kStochasticRound; return &kStochasticRound; }(),
};
// clang-format on

}  // namespace popsim::ops

// The one name of a target's objects that others see.
extern "C" const popsim::ops::Kernels* POPSIM_KERNELS() {
  static const popsim::ops::Kernels kernels{
      .ops = popsim::ops::kOps,
      .can_fuse = &popsim::dense::can_fuse,
      .has_tile_units = &popsim::dense::has_tile_units,
      .emulate_tile_units = &popsim::dense::emulate_tile_units,
      .num_emulated_products = &popsim::dense::num_emulated_products};
  return &kernels;
}
