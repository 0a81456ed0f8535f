// The positions of an axis from which resampling computes each position of the
// result, with their weights.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace popsim::ops {

struct AxisSampling {
  std::string_view mode;  // nearest, nearest_exact, linear, cubic
  bool align_corners;
  bool antialias;
  double scale;  // how many times as long the result is; 0: as the sizes say
};

struct Tap {
  int32_t from;
  float weight;
};

// The taps of all positions of a result, one position after the other.
struct Taps {
  int64_t input_size;
  std::vector<int64_t> first;  // by position; the last element is the end
  std::vector<Tap> taps;

  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(first.size()) - 1;
  }
  [[nodiscard]] bool same(int64_t position, int64_t other) const;
};

// The same positions and weights as in PyTorch, which computes both in float32.
[[nodiscard]] Taps make_taps(const AxisSampling& sampling, int64_t input_size,
                             int64_t output_size);
// The taps that compute the gradient of the input from that of the result.
[[nodiscard]] Taps transposed(const Taps& taps);
// One tap of weight 1 for each position.
[[nodiscard]] Taps identity_taps(int64_t size);

// The taps of a whole row, in an order that fits vectors: tap by tap. All
// positions have the same number of them: missing ones read a zero at
// `input_size`.
class RowTaps {
 public:
  explicit RowTaps(const Taps& taps);

  // Whether the row is copied position by position.
  [[nodiscard]] bool copies() const { return copies_; }
  // Writes `size` numbers. `row` has input_size numbers, then a zero if some
  // positions have fewer taps than others.
  void apply(const float* row, float* out) const;
  [[nodiscard]] bool reads_zero() const { return reads_zero_; }

 private:
  int64_t size_;
  int64_t count_ = 0;  // of taps of each position
  bool copies_ = true;
  bool reads_zero_ = false;
  std::vector<int32_t> from_;
  std::vector<float> weights_;
};

}  // namespace popsim::ops
