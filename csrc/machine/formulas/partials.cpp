#include "machine/formulas/partials.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "machine/constants.h"

namespace popsim::machine {
namespace {

constexpr int64_t kTwoStages = 16;
constexpr int64_t kThreeStages = 125;

}  // namespace

double reduce_partials(int64_t n, int64_t d, bool float_partials,
                       bool float_result) {
  const int64_t width = float_partials ? 4 : 8;  // results at a time
  const int64_t rest = n % width;
  const int64_t loops = n / width + std::popcount(static_cast<uint64_t>(rest));
  int64_t full = loops / constants::kWorkers;
  int64_t extra = 0;
  if (loops % constants::kWorkers != 0) {
    if (rest != 0) {
      extra = 2 * d + (float_partials ? 13 : 11);
    } else {
      ++full;
    }
  }
  const int64_t store = (float_partials ? 6 : 8) + (float_result ? 1 : 0);
  return static_cast<double>(constants::kWorkers *
                             (32 + extra + full * (3 * d + store)));
}

std::vector<int64_t> reduction_depths(int64_t d) {
  std::vector<int64_t> depths;
  if (d < 2) return depths;
  const int stages = d >= kThreeStages ? 3 : d >= kTwoStages ? 2 : 1;
  int64_t rest = d;
  for (int left = stages; left > 1; --left) {
    const double root = std::pow(static_cast<double>(rest), 1.0 / left);
    const int64_t depth =
        std::max<int64_t>(2, static_cast<int64_t>(std::llround(root)));
    depths.push_back(depth);
    rest = (rest + depth - 1) / depth;
  }
  depths.push_back(rest);
  return depths;
}

}  // namespace popsim::machine
