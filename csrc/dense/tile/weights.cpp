#include "dense/tile/weights.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace popsim::dense {
namespace {

// The place relative to the position that is computed.
Point place(const PackedImage& image, const Tap& tap) {
  Point point;
  for (size_t i = 0; i < point.size(); ++i) {
    point[i] = tap.shift[i] * image.phases[i] + tap.phase[i];
  }
  return point;
}

std::vector<Point> places(const PackedImage& image, const Lattice& lattice) {
  std::vector<Point> points;
  for (const Tap& tap : lattice.taps) points.push_back(place(image, tap));
  return points;
}

}  // namespace

std::vector<DepthStep> depth_steps(const PackedImage& image,
                                   const RowContents& contents,
                                   const Lattice& lattice) {
  const std::vector<Point> points = places(image, lattice);
  std::vector<int64_t> order(points.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(
      order, {}, [&](int64_t tap) { return points[static_cast<size_t>(tap)]; });
  const auto tap_beside = [&](int64_t tap) -> int64_t {
    if (contents.group == kStepDepth) return -1;
    Point wanted = points[static_cast<size_t>(tap)];
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] += contents.shift[i];
    const auto found = std::ranges::find(points, wanted);
    return found == points.end() ? -1 : found - points.begin();
  };
  std::vector<DepthStep> steps;
  for (int64_t group = 0; group < contents.num_groups(); ++group) {
    std::vector<bool> done(points.size(), false);
    for (const int64_t tap : order) {
      if (done[static_cast<size_t>(tap)]) continue;
      const int64_t beside = tap_beside(tap);
      if (beside >= 0) done[static_cast<size_t>(beside)] = true;
      steps.push_back({group, tap, beside});
    }
  }
  return steps;
}

TileWeights::TileWeights(const Lattice& lattice, const RowContents& contents,
                         const WeightStrides& strides, int64_t num_columns,
                         int num_parts, std::vector<DepthStep> depth)
    : taps_(lattice.taps),
      contents_(contents),
      strides_(strides),
      num_columns_(num_columns),
      num_parts_(num_parts),
      pack_(pack_function(DType::kFloat32, num_parts, TileOrder::kPairs)),
      depth_(std::move(depth)) {
  for (int64_t step = 0; step < num_steps(); ++step) {
    offsets_.push_back(step * num_parts_ * 2 * kTileNumbers);
  }
}

float TileWeights::pack(const float* weight, int64_t block, float* rows,
                        uint16_t* out) const {
  const int64_t depth = num_steps() * kStepDepth;
  const int64_t first = block * kBlock;
  const int64_t count = std::min(kBlock, num_columns_ - first);
  for (int64_t i = 0; i < count; ++i) {
    float* row = rows + i * depth;
    for (const DepthStep& step : depth_) {
      read(weight + (first + i) * strides_.column, step, row);
      row += kStepDepth;
    }
  }
  return pack_(
      {.data = rows,
       .dtype = DType::kFloat32,
       .rows = count,
       .depth = depth,
       .row_stride = depth,
       .depth_stride = 1},
      {.first_row = 0, .first_depth = 0, .num_steps = num_steps(), .out = out});
}

void TileWeights::read(const float* column, const DepthStep& step,
                       float* row) const {
  std::fill_n(row, kStepDepth, 0.0F);
  const int64_t channel = step.group * contents_.group;
  const int64_t count = std::min(contents_.group, contents_.channels - channel);
  const auto read_tap = [&](int64_t tap, float* to) {
    const float* from = column + channel * strides_.channel +
                        taps_[static_cast<size_t>(tap)].index;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * strides_.channel];
  };
  read_tap(step.tap, row);
  if (step.beside >= 0) read_tap(step.beside, row + kTileRows);
}

}  // namespace popsim::dense
