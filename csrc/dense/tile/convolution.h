// Convolutions of channels-last images by the matrix units of the processor
// (units.h).
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "dense/problem/convolution.h"
#include "dense/tile/parts.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// The numbers that the estimates of cycles() use: a step of two tiles, and
// packing a row of one tile. Measured on an Emerald Rapids processor, and for
// instructions without units on one of Zen 4.
[[nodiscard]] inline double step_cycles(int num_parts) {
  constexpr double kTileProduct = 20;
  constexpr double kTileProductByDots = 290;
  constexpr std::array<int, 4> kProducts{0, 1, 3, 6};
  const double product =
      has_dot_instructions() ? kTileProductByDots : kTileProduct;
  return product * kProducts.at(static_cast<size_t>(num_parts));
}
inline constexpr double kPackedRowCycles = 20;

// One pass of a convolution without groups.
class TileConvolution {
 public:
  TileConvolution() = default;
  TileConvolution(const TileConvolution&) = delete;
  TileConvolution& operator=(const TileConvolution&) = delete;
  virtual ~TileConvolution() = default;

  // An estimate of the cycles of one core at the units' clock.
  [[nodiscard]] virtual double cycles() const = 0;
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // Returns false, and leaves the results incomplete, if some numbers are not
  // ordinary (parts.h).
  [[nodiscard]] virtual bool run(const ConvolutionTensors& tensors,
                                 void* workspace) = 0;
};

// For kForward and kGradInput.
[[nodiscard]] std::unique_ptr<TileConvolution> create_tile_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass);
// For kGradWeight.
[[nodiscard]] std::unique_ptr<TileConvolution> create_tile_grad_weight(
    const ConvolutionSpec& spec);

// Returns `other`, an implementation of the pass, if the processor has neither
// such units nor instructions that do the same, or if `other` is at least as
// fast. Otherwise the result uses `other` for numbers that are not ordinary.
[[nodiscard]] std::unique_ptr<Convolution> with_tile_units(
    std::unique_ptr<Convolution> other, const ConvolutionSpec& spec,
    ConvolutionPass pass);

}  // namespace popsim::dense
