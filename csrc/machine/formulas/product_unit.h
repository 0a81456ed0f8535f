// Cycles of the unit for products on one tile.
//
// PopLibs, poplin/PerformanceEstimation.
#pragma once

#include <cstdint>

namespace popsim::machine {

// The numbers of a product: of its operands and of its partial results.
struct ProductTypes {
  bool half = false;           // float16 operands; otherwise float32
  bool half_partials = false;  // only of float16 operands

  // Output channels and input channels of one pass.
  [[nodiscard]] int64_t units(int32_t version) const {
    if (version == 1) return 8;
    return half && !half_partials ? 8 : 16;
  }
  [[nodiscard]] int64_t channels() const { return half ? 16 : 8; }
  [[nodiscard]] int64_t size() const { return half ? 2 : 4; }
  [[nodiscard]] int64_t partial_size() const { return half_partials ? 2 : 4; }
  // Cycles to load the weights of one pass.
  [[nodiscard]] int64_t load(int32_t version) const {
    return units(version) * channels() * size() / 8;
  }

  friend bool operator==(const ProductTypes&, const ProductTypes&) = default;
  friend auto operator<=>(const ProductTypes&, const ProductTypes&) = default;
};

// `field` elements, each with `in` channels, give `out` channels; in each of
// `groups`.
[[nodiscard]] double product_cycles(const ProductTypes& types, int32_t version,
                                    int64_t field, int64_t in, int64_t out,
                                    int64_t groups);

}  // namespace popsim::machine
