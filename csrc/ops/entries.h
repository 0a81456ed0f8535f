// The entries of the op registry, each defined beside its kernel.
#pragma once

#include "ops/op_def.h"

namespace popsim::ops {

extern const OpDef kAccumulate;             // accumulate.cpp
extern const OpDef kAdamUpdate;             // update_adam.cpp
extern const OpDef kAnchor;                 // anchor.cpp
extern const OpDef kAten;                   // aten.cpp
extern const OpDef kConvolution;            // convolution.cpp
extern const OpDef kConvolutionGradInput;   // convolution.cpp
extern const OpDef kConvolutionGradWeight;  // convolution.cpp
extern const OpDef kCopy;                   // copy.cpp
extern const OpDef kGradientNorm;           // gradient_norm.cpp
extern const OpDef kLambUpdate;             // update_lamb.cpp
extern const OpDef kMap;                    // map.cpp
extern const OpDef kMatmul;                 // matmul.cpp
extern const OpDef kPrint;                  // print.cpp
extern const OpDef kRandom;                 // random.cpp
extern const OpDef kRmspropUpdate;          // update_rmsprop.cpp
extern const OpDef kSgdCombinedAccumulate;  // update_sgd_combined.cpp
extern const OpDef kSgdCombinedUpdate;      // update_sgd_combined.cpp
extern const OpDef kSgdMomentumUpdate;      // update_sgd.cpp
extern const OpDef kSgdUpdate;              // update_sgd.cpp

}  // namespace popsim::ops
