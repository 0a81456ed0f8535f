#include "ops/resample/taps.h"

#include <algorithm>
#include <cmath>

#include "base/numbers.h"

namespace popsim::ops {
namespace {

// The whole part, at least 0 and at most `most`; 0 for NaN.
int64_t whole_within(float value, int64_t most) {
  if (!(value > 0.0f)) return 0;
  if (value >= static_cast<float>(most)) return most;
  return static_cast<int64_t>(value);
}

// How many positions of the input one position of the result stands for.
float step_of(const AxisSampling& sampling, int64_t input, int64_t output) {
  if (sampling.align_corners) {
    return output > 1
               ? static_cast<float>(input - 1) / static_cast<float>(output - 1)
               : 0.0f;
  }
  if (sampling.scale > 0.0) return static_cast<float>(1.0 / sampling.scale);
  return static_cast<float>(input) / static_cast<float>(output);
}

// The place in the input of a position of the result.
float place_of(const AxisSampling& sampling, float step, int64_t position) {
  const auto at = static_cast<float>(position);
  if (sampling.align_corners) return step * at;
  return step * (at + 0.5f) - 0.5f;
}

int64_t nearest(const AxisSampling& sampling, int64_t input, int64_t output,
                int64_t position) {
  const float step = step_of(sampling, input, output);
  if (sampling.mode == "nearest_exact") {
    const double place =
        (static_cast<double>(position) + 0.5) * static_cast<double>(step);
    return whole_within(static_cast<float>(place), input - 1);
  }
  if (output == input) return position;
  if (output == 2 * input) return position / 2;
  return whole_within(static_cast<float>(position) * step, input - 1);
}

void add_linear(const AxisSampling& sampling, int64_t input, int64_t output,
                int64_t position, std::vector<Tap>& taps) {
  if (input == output) {
    taps.push_back({static_cast<int32_t>(position), 1.0f});
    return;
  }
  const float place = std::max(
      place_of(sampling, step_of(sampling, input, output), position), 0.0f);
  const int64_t low = whole_within(place, input - 1);
  const float part = std::clamp(place - static_cast<float>(low), 0.0f, 1.0f);
  const int64_t high = std::min(low + 1, input - 1);
  taps.push_back({static_cast<int32_t>(low), 1.0f - part});
  taps.push_back({static_cast<int32_t>(high), part});
}

// The cubic convolution of Keys (1981). `a` is its derivative at 1.
float cubic(float distance, float a) {
  const float x = std::abs(distance);
  if (x <= 1.0f) return ((a + 2.0f) * x - (a + 3.0f)) * x * x + 1.0f;
  if (x < 2.0f) return ((a * x - 5.0f * a) * x + 8.0f * a) * x - 4.0f * a;
  return 0.0f;
}

void add_cubic(const AxisSampling& sampling, int64_t input, int64_t output,
               int64_t position, std::vector<Tap>& taps) {
  constexpr float kDerivative = -0.75f;
  const float place =
      place_of(sampling, step_of(sampling, input, output), position);
  // Small scales give places before the first position.
  const int64_t low = place < 0.0f ? -whole_within(std::ceil(-place), input)
                                   : whole_within(place, input - 1);
  const float part = std::clamp(place - static_cast<float>(low), 0.0f, 1.0f);
  for (int64_t i = -1; i <= 2; ++i) {
    const int64_t from = std::clamp<int64_t>(low + i, 0, input - 1);
    taps.push_back({static_cast<int32_t>(from),
                    cubic(part - static_cast<float>(i), kDerivative)});
  }
}

// All positions that the stretched filter covers.
void add_antialiased(const AxisSampling& sampling, int64_t input,
                     int64_t output, int64_t position, std::vector<Tap>& taps) {
  constexpr float kDerivative = -0.5f;
  const bool is_cubic = sampling.mode == "cubic";
  const float step = step_of(sampling, input, output);
  const float stretch = std::max(step, 1.0f);
  const float radius = (is_cubic ? 2.0f : 1.0f) * stretch;
  const float center = step * (static_cast<float>(position) + 0.5f);
  const int64_t begin = whole_within(center - radius + 0.5f, input - 1);
  const int64_t end =
      std::max(whole_within(center + radius + 0.5f, input), begin + 1);
  const size_t first = taps.size();
  float sum = 0.0f;
  for (int64_t i = begin; i < end; ++i) {
    const float distance =
        (static_cast<float>(i) - center + 0.5f) * (1.0f / stretch);
    const float weight = is_cubic ? cubic(distance, kDerivative)
                                  : std::max(1.0f - std::abs(distance), 0.0f);
    taps.push_back({static_cast<int32_t>(i), weight});
    sum += weight;
  }
  if (sum == 0.0f) return;
  for (size_t i = first; i < taps.size(); ++i) taps[i].weight /= sum;
}

void add_taps(const AxisSampling& sampling, int64_t input, int64_t output,
              int64_t position, std::vector<Tap>& taps) {
  if (sampling.antialias) {
    add_antialiased(sampling, input, output, position, taps);
  } else if (sampling.mode == "linear") {
    add_linear(sampling, input, output, position, taps);
  } else if (sampling.mode == "cubic") {
    add_cubic(sampling, input, output, position, taps);
  } else {
    const int64_t from = nearest(sampling, input, output, position);
    taps.push_back({static_cast<int32_t>(from), 1.0f});
  }
}

}  // namespace

bool Taps::same(int64_t position, int64_t other) const {
  const auto range = [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    return std::ranges::subrange(taps.begin() + first[at],
                                 taps.begin() + first[at + 1]);
  };
  return std::ranges::equal(range(position), range(other),
                            [](const Tap& a, const Tap& b) {
                              return a.from == b.from && a.weight == b.weight;
                            });
}

Taps make_taps(const AxisSampling& sampling, int64_t input_size,
               int64_t output_size) {
  Taps result{input_size, {0}, {}};
  for (int64_t i = 0; i < output_size; ++i) {
    add_taps(sampling, input_size, output_size, i, result.taps);
    result.first.push_back(static_cast<int64_t>(result.taps.size()));
  }
  return result;
}

Taps transposed(const Taps& taps) {
  const auto size = static_cast<size_t>(taps.input_size);
  Taps result{taps.size(), std::vector<int64_t>(size + 1), {}};
  for (const Tap& tap : taps.taps) {
    ++result.first[static_cast<size_t>(tap.from) + 1];
  }
  for (size_t i = 0; i < size; ++i) result.first[i + 1] += result.first[i];
  result.taps.resize(taps.taps.size());
  std::vector<int64_t> next(result.first.begin(), result.first.end() - 1);
  for (int64_t i = 0; i < taps.size(); ++i) {
    const auto at = static_cast<size_t>(i);
    for (int64_t t = taps.first[at]; t < taps.first[at + 1]; ++t) {
      const Tap& tap = taps.taps[static_cast<size_t>(t)];
      const int64_t place = next[static_cast<size_t>(tap.from)]++;
      result.taps[static_cast<size_t>(place)] = {static_cast<int32_t>(i),
                                                 tap.weight};
    }
  }
  return result;
}

Taps identity_taps(int64_t size) {
  return make_taps({"nearest", false, false, 0.0}, size, size);
}

RowTaps::RowTaps(const Taps& taps) : size_(taps.size()) {
  for (size_t i = 0; i + 1 < taps.first.size(); ++i) {
    count_ = std::max(count_, taps.first[i + 1] - taps.first[i]);
  }
  const auto total = static_cast<size_t>(count_ * size_);
  from_.assign(total, static_cast<int32_t>(taps.input_size));
  weights_.assign(total, 0.0f);
  reads_zero_ = taps.taps.size() < total;
  copies_ = count_ == 1 && !reads_zero_;
  for (int64_t i = 0; i < size_; ++i) {
    const auto at = static_cast<size_t>(i);
    for (int64_t t = taps.first[at]; t < taps.first[at + 1]; ++t) {
      const Tap& tap = taps.taps[static_cast<size_t>(t)];
      const auto place = static_cast<size_t>((t - taps.first[at]) * size_ + i);
      from_[place] = tap.from;
      weights_[place] = tap.weight;
      copies_ = copies_ && tap.weight == 1.0f;
    }
  }
}

void RowTaps::apply(const float* row, float* __restrict out) const {
  const int32_t* __restrict from = from_.data();
  if (count_ == 0) {
    std::fill_n(out, size_, 0.0f);
    return;
  }
  if (copies_) {
    for (int64_t i = 0; i < size_; ++i) out[i] = row[from[i]];
    return;
  }
  const float* __restrict weights = weights_.data();
  int64_t tap = 0;
  if (count_ == 1) {
    for (int64_t i = 0; i < size_; ++i) out[i] = weights[i] * row[from[i]];
    return;
  }
  // Pairs of taps, because each pass over the row reads and writes the sums.
  for (; tap + 2 <= count_; tap += 2, from += 2 * size_, weights += 2 * size_) {
    const int32_t* __restrict second = from + size_;
    const float* __restrict other = weights + size_;
    if (tap == 0) {
      for (int64_t i = 0; i < size_; ++i) {
        out[i] =
            multiply_add(other[i], row[second[i]], weights[i] * row[from[i]]);
      }
    } else {
      for (int64_t i = 0; i < size_; ++i) {
        const float sum = multiply_add(weights[i], row[from[i]], out[i]);
        out[i] = multiply_add(other[i], row[second[i]], sum);
      }
    }
  }
  if (tap < count_) {
    for (int64_t i = 0; i < size_; ++i) {
      out[i] = multiply_add(weights[i], row[from[i]], out[i]);
    }
  }
}

}  // namespace popsim::ops
