// The entries of the op registry, each defined beside its kernel.
#pragma once

#include "ops/op_def.h"

namespace popsim::ops {

extern const OpDef kAccumulate;             // accumulate.cpp
extern const OpDef kAdamUpdate;             // update_adam.cpp
extern const OpDef kAnchor;                 // anchor.cpp
extern const OpDef kAten;                   // aten.cpp
extern const OpDef kAttention;              // attention.cpp
extern const OpDef kAttentionGrad;          // attention_grad.cpp
extern const OpDef kAveragePool;            // pool_average.cpp
extern const OpDef kAveragePoolGrad;        // pool_average.cpp
extern const OpDef kBatchNormGrad;          // batch_norm.cpp
extern const OpDef kBatchNormStatistics;    // batch_norm.cpp
extern const OpDef kCat;                    // join.cpp
extern const OpDef kConvolution;            // convolution.cpp
extern const OpDef kConvolutionGradInput;   // convolution.cpp
extern const OpDef kConvolutionGradWeight;  // convolution.cpp
extern const OpDef kCopy;                   // copy.cpp
extern const OpDef kCrossEntropyGrad;       // nll_loss.cpp
extern const OpDef kEmbedding;              // embedding.cpp
extern const OpDef kEmbeddingGrad;          // embedding.cpp
extern const OpDef kGradientNorm;           // gradient_norm.cpp
extern const OpDef kGroupNorm;              // group_norm.cpp
extern const OpDef kGroupNormGrad;          // group_norm.cpp
extern const OpDef kIntoZeros;              // join.cpp
extern const OpDef kLambUpdate;             // update_lamb.cpp
extern const OpDef kLayerNorm;              // layer_norm.cpp
extern const OpDef kLayerNormGrad;          // layer_norm.cpp
extern const OpDef kMap;                    // map.cpp
extern const OpDef kMatmul;                 // matmul.cpp
extern const OpDef kMaxPool;                // pool_max.cpp
extern const OpDef kMaxPoolGrad;            // pool_max.cpp
extern const OpDef kNllLoss;                // nll_loss.cpp
extern const OpDef kNllLossGrad;            // nll_loss.cpp
extern const OpDef kPrint;                  // print.cpp
extern const OpDef kRandom;                 // random.cpp
extern const OpDef kRecurrent;              // recurrent.cpp
extern const OpDef kRecurrentGrad;          // recurrent_grad.cpp
extern const OpDef kReduce;                 // reduce.cpp
extern const OpDef kRmspropUpdate;          // update_rmsprop.cpp
extern const OpDef kSgdCombinedAccumulate;  // update_sgd_combined.cpp
extern const OpDef kSgdCombinedUpdate;      // update_sgd_combined.cpp
extern const OpDef kSgdMomentumUpdate;      // update_sgd.cpp
extern const OpDef kSgdProductUpdate;       // update_sgd_product.cpp
extern const OpDef kSgdUpdate;              // update_sgd.cpp
extern const OpDef kSoftmax;                // softmax.cpp
extern const OpDef kSoftmaxGrad;            // softmax.cpp

}  // namespace popsim::ops
