// Convolutions by the matrix units of the processor (units.h), on images
// that are channels last.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "dense/problem/convolution.h"
#include "dense/tile/parts.h"

namespace popsim::dense {

// What the estimates of cycles() are made of, measured on an Emerald Rapids
// processor: a step of two tiles, and packing a row of one.
[[nodiscard]] constexpr double step_cycles(int num_parts) {
  constexpr double kTileProduct = 20;
  constexpr std::array<int, 4> kProducts{0, 1, 3, 6};
  return kTileProduct * kProducts.at(static_cast<size_t>(num_parts));
}
inline constexpr double kPackedRowCycles = 20;

// A pass of a convolution with groups of 1.
class TileConvolution {
 public:
  TileConvolution() = default;
  TileConvolution(const TileConvolution&) = delete;
  TileConvolution& operator=(const TileConvolution&) = delete;
  virtual ~TileConvolution() = default;

  // Cycles of one core at the units' clock, about.
  [[nodiscard]] virtual double cycles() const = 0;
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // Returns false, and leaves results incomplete, where numbers are not
  // ordinary (parts.h).
  [[nodiscard]] virtual bool run(const ConvolutionTensors& tensors,
                                 void* workspace) = 0;
};

// kForward or kGradInput.
[[nodiscard]] std::unique_ptr<TileConvolution> create_tile_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass);
// kGradWeight.
[[nodiscard]] std::unique_ptr<TileConvolution> create_tile_grad_weight(
    const ConvolutionSpec& spec);

// Returns `other`, an implementation of the pass, where the processor has no
// such units or where it is at least as fast. Else what is returned uses it for
// numbers that are not ordinary.
[[nodiscard]] std::unique_ptr<Convolution> with_tile_units(
    std::unique_ptr<Convolution> other, const ConvolutionSpec& spec,
    ConvolutionPass pass);

}  // namespace popsim::dense
