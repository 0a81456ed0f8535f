#include "ops/math/half_rounding.h"

#include <algorithm>
#include <bit>

#include "ops/math/philox.h"

namespace popsim::ops {
namespace {

static_assert(HalfRounding::kGroup == 4 * kPhiloxLanes);

// Random tensors use the streams from 0 on, so this bit keeps the streams
// apart.
constexpr uint32_t kRounding = 0x80000000;

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kDropped = 0x1FFF;  // the bits that float16 does not have
constexpr uint32_t kLargest = 0x477FE000;  // 65504, the largest finite float16
// 65520: this and larger numbers are rounded to infinity.
constexpr uint32_t kInfinite = 0x477FF000;
constexpr uint32_t kSmallest = 0x38800000;  // 2^-14, the smallest normal number

// Rounds a magnitude below the normal numbers: the results are multiples of
// 2^-24.
uint32_t round_subnormal(uint32_t magnitude, uint32_t word) {
  const float steps = std::bit_cast<float>(magnitude) * 0x1p24F;
  const auto whole = static_cast<float>(static_cast<int32_t>(steps));
  const float chance = static_cast<float>(word >> 8) * 0x1p-24F;
  const float rounded = chance < steps - whole ? whole + 1.0F : whole;
  return std::bit_cast<uint32_t>(rounded * 0x1p-24F);
}

float rounded(float value, uint32_t word) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & ~kSign;
  if (magnitude >= kInfinite) return value;
  uint32_t result = 0;
  if (magnitude < kSmallest) {
    result = round_subnormal(magnitude, word);
  } else {
    // The number of random values of the dropped bits that carry into the
    // higher bits is the distance from the number below: the probability is as
    // required.
    result = (magnitude + (word & kDropped)) & ~kDropped;
    result = std::min(result, kLargest);
  }
  return std::bit_cast<float>(result | (bits & kSign));
}

void draw(const RunContext& context, uint32_t stream, int64_t group,
          PhiloxWords& words) {
  const auto step = static_cast<uint64_t>(context.cursor.step);
  const auto counter =
      static_cast<uint32_t>(group * static_cast<int64_t>(kPhiloxLanes));
  for (size_t i = 0; i < kPhiloxLanes; ++i) {
    words[0][i] = counter + static_cast<uint32_t>(i);
  }
  words[1].fill(stream);
  words[2].fill(static_cast<uint32_t>(step));
  words[3].fill(static_cast<uint32_t>(step >> 32));
  philox(words, {static_cast<uint32_t>(context.seed),
                 static_cast<uint32_t>(context.seed >> 32)});
}

}  // namespace

HalfRounding::HalfRounding(int64_t stream)
    : stream_(static_cast<uint32_t>(stream) | kRounding) {}

void HalfRounding::round(const RunContext& context, int64_t first,
                         int64_t count, float* values) const {
  constexpr auto kLanes = static_cast<int64_t>(kPhiloxLanes);
  const int64_t last = first + count;
  PhiloxWords words;
  for (int64_t i = first; i < last;) {
    const int64_t group = i / kGroup;
    draw(context, stream_, group, words);
    const int64_t end = std::min(last, (group + 1) * kGroup);
    for (; i < end; ++i) {
      const int64_t place = i - group * kGroup;
      const uint32_t word = words[static_cast<size_t>(place / kLanes)]
                                 [static_cast<size_t>(place % kLanes)];
      values[i - first] = rounded(values[i - first], word);
    }
  }
}

}  // namespace popsim::ops
