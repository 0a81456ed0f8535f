// Emulates the matrix units of x86 processors in software, bit for bit, so that
// tests run the code around them on every x86-64 processor. It is slow.
//
// Follows the definition of TDPBF16PS in Intel's Software Developer's Manual:
// for each element of the sum, the even and the odd numbers of the depth are
// added up separately, by fused multiply-adds that start from zero; then these
// two sums are added, and then their sum and the old element. All operations
// round to nearest, ties to even. They treat numbers below 2^-126 as zero,
// return zero instead of such numbers, and raise no exceptions, whatever the
// thread's settings are.
#pragma once

#include <immintrin.h>

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace popsim::dense {

class EmulatedUnits {
 public:
  // The processor's own float32 arithmetic does the same with these settings.
  EmulatedUnits() : before_(_mm_getcsr()) { set_control(kControl); }
  EmulatedUnits(const EmulatedUnits&) = delete;
  EmulatedUnits& operator=(const EmulatedUnits&) = delete;
  ~EmulatedUnits() {
    set_control(before_);
    all_products_ += products_;
  }

  // The number of products that all destroyed objects have computed.
  static int64_t num_products() { return all_products_; }

  template <int kTile>
  void zero() {
    tiles_[kTile] = {};
  }

  // `stride`: bytes between rows.
  template <int kTile>
  void load(const void* from, int64_t stride) {
    const auto* bytes = static_cast<const char*>(from);
    for (size_t row = 0; row < kRows; ++row, bytes += stride) {
      std::memcpy(&tiles_[kTile][row], bytes, sizeof(Row));
    }
  }

  template <int kTile>
  void store(void* to, int64_t stride) {
    auto* bytes = static_cast<char*>(to);
    for (size_t row = 0; row < kRows; ++row, bytes += stride) {
      std::memcpy(bytes, &tiles_[kTile][row], sizeof(Row));
    }
  }

  // Adds the product of tiles of bfloat16 numbers to one of float32.
  template <int kSum, int kA, int kB>
  void multiply() {
    ++products_;
    multiply(tiles_[kSum], tiles_[kA], tiles_[kB]);
  }

 private:
  // No exceptions, rounding to nearest, and zero for small results and
  // operands.
  static constexpr uint32_t kControl = 0x1f80 | 0x8000 | 0x0040;
  static constexpr size_t kRows = 16;
  // Float32 numbers, or pairs of bfloat16 numbers with the even one in the
  // lower bits.
  using Row = std::array<uint32_t, 16>;
  using Tile = std::array<Row, kRows>;
  using Floats = std::array<float, 16>;

  // The compiler must not move arithmetic across this.
  static void set_control(uint32_t control) {
    asm volatile("" ::: "memory");
    _mm_setcsr(control);
    asm volatile("" ::: "memory");
  }

  static float even(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
  static float odd(uint32_t pair) {
    return std::bit_cast<float>(pair & 0xffff0000U);
  }

  static void multiply(Tile& sum, const Tile& a, const Tile& b) {
    std::array<Floats, kRows> even_b;
    std::array<Floats, kRows> odd_b;
    for (size_t k = 0; k < kRows; ++k) {
      for (size_t n = 0; n < 16; ++n) {
        even_b[k][n] = even(b[k][n]);
        odd_b[k][n] = odd(b[k][n]);
      }
    }
    for (size_t m = 0; m < kRows; ++m) {
      Floats even_sums{};
      Floats odd_sums{};
      for (size_t k = 0; k < kRows; ++k) {
        const float even_a = even(a[m][k]);
        const float odd_a = odd(a[m][k]);
        for (size_t n = 0; n < 16; ++n) {
          even_sums[n] = std::fma(even_a, even_b[k][n], even_sums[n]);
          odd_sums[n] = std::fma(odd_a, odd_b[k][n], odd_sums[n]);
        }
      }
      for (size_t n = 0; n < 16; ++n) {
        const float before = std::bit_cast<float>(sum[m][n]);
        sum[m][n] =
            std::bit_cast<uint32_t>(before + (even_sums[n] + odd_sums[n]));
      }
    }
  }

  static inline std::atomic<int64_t> all_products_ = 0;

  uint32_t before_;
  int64_t products_ = 0;
  alignas(64) std::array<Tile, 8> tiles_;
};

}  // namespace popsim::dense
