// Every op of the device, listed one by one.
#include <array>

#include "ops/entries.h"

namespace popsim::ops {

namespace {

constexpr std::array<const OpDef*, 19> kOps{
    &kAccumulate,
    &kAdamUpdate,
    &kAnchor,
    &kAten,
    &kConvolution,
    &kConvolutionGradInput,
    &kConvolutionGradWeight,
    &kCopy,
    &kGradientNorm,
    &kLambUpdate,
    &kMap,
    &kMatmul,
    &kPrint,
    &kRandom,
    &kRmspropUpdate,
    &kSgdCombinedAccumulate,
    &kSgdCombinedUpdate,
    &kSgdMomentumUpdate,
    &kSgdUpdate,
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
