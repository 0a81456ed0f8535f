// Farthest point sampling: chooses some rows of each segment of a table. Each
// chosen row is as far as possible from the rows chosen before it.
//
// The distance of a row is the distance to the nearest chosen row, as the sum
// of the squares of the differences. The columns are stored separately, so a
// vector holds one value of several rows; each distance is added up separately,
// in the order of the columns. One thread processes a segment.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>

#include "base/numbers.h"
#include "ops/countable.h"
#include "ops/math/vec_math.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/rows.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kChosen = -1.0f;     // less than any distance
constexpr int64_t kElementCost = 3;  // in additions

// The rows to choose from one segment.
struct Segment {
  int64_t first = 0;  // row
  int64_t size = 0;
  int64_t count = 0;         // number of rows to choose
  int64_t first_result = 0;  // index of its first result
};

std::vector<Segment> segments_of(const OpView& op) {
  const auto& bounds = op.attribute<std::vector<int64_t>>("bounds");
  const auto& counts = op.attribute<std::vector<int64_t>>("counts");
  std::vector<Segment> segments;
  int64_t first_result = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    segments.push_back(
        {bounds[i], bounds[i + 1] - bounds[i], counts[i], first_result});
    first_result += counts[i];
  }
  return segments;
}

// The number of squared differences that are added up to choose all rows.
int64_t num_squares(const OpView& op) {
  double rows = 0.0;
  for (const Segment& segment : segments_of(op)) {
    rows +=
        static_cast<double>(segment.size) * static_cast<double>(segment.count);
  }
  return countable(rows * static_cast<double>(op.input(0).shape[1]));
}

class FarthestPoints final : public Kernel {
 public:
  explicit FarthestPoints(const OpView& op)
      : width_(op.input(0).shape[1]),
        segments_(segments_of(op)),
        points_({op.input_id(0), op.input(0).dtype, op.input(0).shape,
                 op.input(0).strides},
                {1, 0}, /*keep=*/false, workspace_),
        distances_(workspace_.add(static_cast<size_t>(op.input(0).shape[0]) *
                                  sizeof(float))),
        out_(op.output_id(0)),
        shares_(threads::additions(kElementCost * num_squares(op)),
                std::ssize(segments_)) {
    if (op.has_input(1)) {
      starts_.emplace(op, 1, std::ssize(segments_));
      start_values_.resize(segments_.size());
    }
  }

  void run(const RunContext& context) override {
    char* memory = workspace_.memory();
    const float* points = points_.load(context, memory);
    auto* distances = reinterpret_cast<float*>(memory + distances_);
    auto* out = context.data<int64_t>(out_);
    const float* starts =
        starts_ ? starts_->read(context, 0, start_values_.data()) : nullptr;
    shares_.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        const Segment& segment = segments_[static_cast<size_t>(i)];
        const int64_t start =
            starts == nullptr ? 0 : start_of(segment, starts[i]);
        choose(segment, start, points + segment.first,
               distances + segment.first, out + segment.first_result);
      }
    });
  }

 private:
  // The first row to choose, for a number in [0, 1).
  static int64_t start_of(const Segment& segment, float position) {
    const double row =
        static_cast<double>(position) * static_cast<double>(segment.size);
    const auto last =
        static_cast<double>(std::max<int64_t>(segment.size, 1)) - 1;
    return row >= 0.0 ? static_cast<int64_t>(std::min(row, last)) : 0;
  }

  void choose(const Segment& segment, int64_t start, const float* points,
              float* distances, int64_t* out) const {
    std::fill_n(distances, segment.size, kInfinity);
    int64_t chosen = start;
    for (int64_t i = 0; i < segment.count; ++i) {
      if (i > 0) chosen = farthest(segment.size, chosen, points, distances);
      distances[chosen] = kChosen;
      out[i] = segment.first + chosen;
    }
  }

  // Updates the distances for one more chosen row, and returns the farthest of
  // the other rows; the first one if there are several. If the distance to the
  // chosen row is NaN, because a coordinate is NaN, the row keeps its old
  // distance.
  [[nodiscard]] int64_t farthest(int64_t size, int64_t chosen,
                                 const float* points, float* distances) const {
    const int64_t stride = points_.strides()[1];
    Vec longest(kChosen);
    Vec where(0.0f);  // index of the first row of each lane's vector, as bits
    for_each_vector(size, [&](int64_t i, auto n) {
      Vec sum(0.0f);
      for (int64_t k = 0; k < width_; ++k) {
        const float* column = points + k * stride;
        const Vec difference = load(column + i, n) - Vec(column[chosen]);
        sum = sum + difference * difference;
      }
      const Vec before = load(distances + i, n);
      const Vec now = Vec::blendv(before, sum, sum < before);
      store(now, distances + i, n);
      const Vec counted = keep(now, Vec(kChosen), n);
      const Vec is_longer = counted > longest;
      longest = Vec::blendv(longest, counted, is_longer);
      where = Vec::blendv(
          where, Vec(std::bit_cast<float>(static_cast<int32_t>(i))), is_longer);
    });
    return first_of_longest(longest, where);
  }

  static int64_t first_of_longest(const Vec& longest, const Vec& where) {
    std::array<float, kLanes> lengths;
    std::array<float, kLanes> begins;
    longest.store(lengths.data());
    where.store(begins.data());
    const float most = *std::ranges::max_element(lengths);
    int64_t first = std::numeric_limits<int64_t>::max();
    for (size_t lane = 0; lane < lengths.size(); ++lane) {
      if (lengths[lane] != most) continue;
      const int64_t row =
          std::bit_cast<int32_t>(begins[lane]) + static_cast<int64_t>(lane);
      first = std::min(first, row);
    }
    return first;
  }

  int64_t width_;
  std::vector<Segment> segments_;
  Workspace workspace_;
  FloatInput points_;  // the columns are stored separately
  size_t distances_;   // of all rows, in the workspace
  graph::TensorId out_;
  std::optional<RowInput> starts_;
  std::vector<float> start_values_;
  threads::Shares shares_;
};

std::vector<TensorType> fps_type(const OpCall& op) {
  op.require_rank(0, 2);
  const Shape& shape = op.input(0).shape;
  const auto& bounds = op.attribute<std::vector<int64_t>>("bounds");
  const auto& counts = op.attribute<std::vector<int64_t>>("counts");
  op.require(bounds.size() == counts.size() + 1,
             "each segment has two bounds and a number of points");
  op.require(op.input(0).numel() > 0, "the points are not empty");
  op.require(shape[0] <= std::numeric_limits<int32_t>::max(),
             "the numbers of points fit into 32 bits");
  int64_t total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    op.require(bounds[i] >= 0 && bounds[i] <= bounds[i + 1] &&
                   bounds[i + 1] <= shape[0],
               "the bounds ascend and lie between 0 and the number of points");
    op.require(counts[i] >= 0 && counts[i] <= bounds[i + 1] - bounds[i],
               "each count is at most the number of points of its segment");
    total += counts[i];
  }
  if (op.has_input(1)) op.require_shape(1, {std::ssize(counts)});
  return {{DType::kInt64, {total}}};
}

std::vector<graph::Work> fps_work(const OpView& op) {
  return {graph::Elementwise{num_squares(op), kElementCost}};
}

}  // namespace

extern const OpDef kFps{
    .name = "fps",
    .schema =
        "fps(Tensor{floats} points, Tensor{float32}? starts, *, "
        "int{0..}[] bounds, int{0..}[] counts) -> Tensor",
    .family = "points",
    .shape = fps_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<FarthestPoints>(op);
    },
    .work = fps_work,
};

}  // namespace popsim::ops
