// Multiplies at most kTileRows rows with several columns of tiles, by a
// sequence of tile instructions. `Units` as in block_kernel.h.
#pragma once

#include <cstddef>
#include <utility>

#include "dense/tile/block_kernel.h"
#include "dense/tile/units.h"

namespace popsim::dense {

// Loads cost more than they do in a block, whose tiles take part in two
// products each. So each tile is loaded once for a step: tiles 0 to 3 have
// sums, 4 to 6 all parts of the rows, and 7 has each part of each vector in
// turn. It takes the same pairs of parts as a block, in another order.
template <int kParts, int kVectors, typename Units>
class RowKernel {
 public:
  static void run(const RowProduct& product) {
    RowKernel kernel(product);
    kernel.run(std::make_index_sequence<kVectors>(),
               std::make_index_sequence<kParts>());
  }

 private:
  static constexpr int64_t kRowBytes = 64;
  static constexpr int64_t kPart = 2 * kTileNumbers;
  static constexpr int64_t kStep = kParts * kPart;

  explicit RowKernel(const RowProduct& product) : product_(product) {}

  template <size_t... kVector, size_t... kI>
  void run(std::index_sequence<kVector...> vectors,
           std::index_sequence<kI...> /*parts*/) {
    (units_.template zero<static_cast<int>(kVector)>(), ...);
    for (int64_t step = 0; step < product_.num_steps; ++step) {
      const int64_t at = step * kStep;
      (units_.template load<4 + static_cast<int>(kI)>(
           product_.a + at + static_cast<int64_t>(kI) * kPart, kRowBytes),
       ...);
      // The small products first.
      (multiply_part<kParts - 1 - static_cast<int>(kI)>(at, vectors), ...);
    }
    (units_.template store<static_cast<int>(kVector)>(
         product_.sums + static_cast<int64_t>(kVector) * kTileRows,
         product_.sum_stride * static_cast<int64_t>(sizeof(float))),
     ...);
  }

  template <int kPartOfB, size_t... kVector>
  void multiply_part(int64_t at, std::index_sequence<kVector...> /*vectors*/) {
    (multiply_vector<static_cast<int>(kVector)>(
         at + kPartOfB * kPart, std::make_index_sequence<kParts - kPartOfB>()),
     ...);
  }

  template <int kVector, size_t... kI>
  void multiply_vector(int64_t at, std::index_sequence<kI...> /*parts*/) {
    constexpr int kLast = static_cast<int>(sizeof...(kI)) - 1;
    units_.template load<7>(product_.b + at + kVector / 2 * product_.block +
                                kVector % 2 * kTileNumbers,
                            kRowBytes);
    (units_.template multiply<kVector, 4 + kLast - static_cast<int>(kI), 7>(),
     ...);
  }

  const RowProduct& product_;
  Units units_;
};

template <typename Units, int kParts>
RowFunction row_function_of(int64_t num_vectors) {
  switch (num_vectors) {
    case 1:
      return RowKernel<kParts, 1, Units>::run;
    case 2:
      return RowKernel<kParts, 2, Units>::run;
    case 3:
      return RowKernel<kParts, 3, Units>::run;
    default:
      return RowKernel<kParts, 4, Units>::run;
  }
}

template <typename Units>
RowFunction row_function_of(int num_parts, int64_t num_vectors) {
  switch (num_parts) {
    case 1:
      return row_function_of<Units, 1>(num_vectors);
    case 2:
      return row_function_of<Units, 2>(num_vectors);
    default:
      return row_function_of<Units, 3>(num_vectors);
  }
}

}  // namespace popsim::dense
