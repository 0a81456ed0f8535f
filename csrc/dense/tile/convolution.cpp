#include "dense/tile/convolution.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "dense/tile/units.h"

namespace popsim::dense {
namespace {

class WithTileUnits final : public Convolution {
 public:
  WithTileUnits(std::unique_ptr<TileConvolution> tiles,
                std::unique_ptr<Convolution> other)
      : tiles_(std::move(tiles)), other_(std::move(other)) {}

  size_t workspace_bytes() const override {
    return std::max(tiles_->workspace_bytes(), other_->workspace_bytes());
  }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    if (!tiles_->run(tensors, workspace)) other_->run(tensors, workspace);
  }

 private:
  std::unique_ptr<TileConvolution> tiles_;
  std::unique_ptr<Convolution> other_;
};

double product_of(const Extents& values) {
  return std::accumulate(values.begin(), values.end(), 1.0,
                         std::multiplies<>());
}

// Estimates the cycles, at the units' clock, of one core with vector
// instructions. The numbers were measured as those of cycles() were.
double other_cycles(const ConvolutionSpec& spec) {
  const double flops_per_cycle = has_dot_instructions() ? 28 : 75;
  const int64_t per_position =
      spec.batch * spec.in_channels * spec.out_channels;
  return 2.0 * static_cast<double>(per_position) *
         product_of(spec.kernel_size) * product_of(spec.output_size) /
         flops_per_cycle;
}

}  // namespace

std::unique_ptr<Convolution> with_tile_units(std::unique_ptr<Convolution> other,
                                             const ConvolutionSpec& spec,
                                             ConvolutionPass pass) {
  // A smaller gain is lost if a neighbouring core uses the units too.
  constexpr double kMinGain = 1.1;
  if (other == nullptr || spec.groups != 1 ||
      !multiplies_tiles(num_parts_of(spec.significant_bits)) ||
      spec.input_order != Order::kChannelsLast ||
      spec.output_order != Order::kChannelsLast) {
    return other;
  }
  auto tiles = pass == ConvolutionPass::kGradWeight
                   ? create_tile_grad_weight(spec)
                   : create_tile_convolution(spec, pass);
  if (kMinGain * tiles->cycles() > other_cycles(spec)) return other;
  return std::make_unique<WithTileUnits>(std::move(tiles), std::move(other));
}

}  // namespace popsim::dense
