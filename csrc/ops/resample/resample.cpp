// Images, volumes and sequences of another size: interpolation, and the
// gradient of its input.
//
// Each row of the result is the weighted sum of some rows of the input, whose
// elements are then combined along the row. The gradient does the same with
// transposed weights, so each result has one thread and one order of additions.
#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "ops/math/vec_math.h"
#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/rows.h"
#include "ops/resample/taps.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr size_t kAxes = 3;  // depth, height, width

using Extent = std::array<int64_t, kAxes>;

// The sizes behind batch and channels, with ones in front.
Extent extent_of(const std::vector<int64_t>& size) {
  Extent extent{1, 1, 1};
  std::ranges::copy(size, extent.end() - static_cast<ptrdiff_t>(size.size()));
  return extent;
}

std::vector<int64_t> spatial(const Shape& shape) {
  return {shape.begin() + 2, shape.end()};
}

std::vector<Taps> read_taps(const OpCall& op, const std::vector<int64_t>& from,
                            const std::vector<int64_t>& to) {
  const auto& scales = op.attribute<std::vector<double>>("scales");
  const auto& mode = op.attribute<std::string>("mode");
  std::vector<Taps> taps;
  for (size_t i = from.size(); i < kAxes; ++i) {
    taps.push_back(identity_taps(1));
  }
  for (size_t i = 0; i < from.size(); ++i) {
    const AxisSampling sampling{mode, op.attribute<bool>("align_corners"),
                                op.attribute<bool>("antialias"), scales[i]};
    taps.push_back(make_taps(sampling, from[i], to[i]));
  }
  return taps;
}

template <bool kGradient>
std::vector<Taps> taps_of(const OpView& op) {
  const std::vector<int64_t> read = spatial(op.input(0).shape);
  const std::vector<int64_t> written = spatial(op.output(0).shape);
  if (!kGradient) return read_taps(op, read, written);
  std::vector<Taps> taps = read_taps(op, written, read);
  for (Taps& axis : taps) axis = transposed(axis);
  return taps;
}

// Computes the result, or the gradient of the input.
template <bool kGradient>
class Resample final : public Kernel {
 public:
  explicit Resample(const OpView& op)
      : from_(extent_of(spatial(op.input(0).shape))),
        to_(extent_of(spatial(op.output(0).shape))),
        taps_(taps_of<kGradient>(op)),
        row_(taps_.back()),
        x_(op.input_id(0), op.input(0), workspace_),
        y_(op.output_id(0), op.output(0), workspace_),
        shares_(threads::elements(op.input(0).numel() + op.output(0).numel()),
                op.output(0).numel() / to_[2]),
        scratch_(static_cast<size_t>(shares_.limit())) {
    for (auto& floats : scratch_) {
      floats.resize(static_cast<size_t>(padded(from_[2] + 1)));
    }
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* x = x_.load(context, workspace);
    float* y = y_.buffer(context, workspace);
    shares_.run([&](int64_t share, threads::Range rows) {
      float* scratch = scratch_[static_cast<size_t>(share)].data();
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* out = y + row * to_[2];
        if (row > rows.begin && is_repeated(row)) {
          std::copy_n(out - to_[2], to_[2], out);
        } else {
          row_.apply(combined_rows(x, row, scratch), out);
        }
      }
    });
    y_.store(context, workspace);
  }

 private:
  // Whether a row of the result is the same as the one before it.
  [[nodiscard]] bool is_repeated(int64_t row) const {
    const int64_t height = row % to_[1];
    return height > 0 && taps_[1].same(height, height - 1);
  }

  // The sum of the rows of the input that a row of the result needs.
  const float* combined_rows(const float* x, int64_t row,
                             float* scratch) const {
    const int64_t height = row % to_[1];
    const int64_t depth = row / to_[1] % to_[0];
    const float* plane =
        x + row / (to_[1] * to_[0]) * (from_[0] * from_[1] * from_[2]);
    const auto range = [](const Taps& taps, int64_t i) {
      const auto at = static_cast<size_t>(i);
      return threads::Range{taps.first[at], taps.first[at + 1]};
    };
    const threads::Range down = range(taps_[0], depth);
    const threads::Range across = range(taps_[1], height);
    bool begun = false;
    for (int64_t d = down.begin; d < down.end; ++d) {
      for (int64_t h = across.begin; h < across.end; ++h) {
        const Tap& outer = taps_[0].taps[static_cast<size_t>(d)];
        const Tap& inner = taps_[1].taps[static_cast<size_t>(h)];
        const float* source =
            plane + (outer.from * from_[1] + inner.from) * from_[2];
        const float weight = outer.weight * inner.weight;
        const bool single = down.size() == 1 && across.size() == 1;
        if (single && weight == 1.0f && !row_.reads_zero()) return source;
        add(source, weight, begun, scratch);
        begun = true;
      }
    }
    if (!begun) std::fill_n(scratch, from_[2], 0.0f);
    scratch[from_[2]] = 0.0f;
    return scratch;
  }

  void add(const float* source, float weight, bool begun, float* sums) const {
    const Vec factor(weight);
    if (begun) {
      for_each_vector(from_[2], [&](int64_t i, auto n) {
        const Vec sum =
            at::vec::fmadd(load(source + i, n), factor, load(sums + i, n));
        store(sum, sums + i, n);
      });
    } else {
      for_each_vector(from_[2], [&](int64_t i, auto n) {
        store(load(source + i, n) * factor, sums + i, n);
      });
    }
  }

  Extent from_;
  Extent to_;
  std::vector<Taps> taps_;  // by axis
  RowTaps row_;
  Workspace workspace_;
  FloatInput x_;
  FloatOutput y_;
  threads::Shares shares_;
  std::vector<std::vector<float>> scratch_;  // by share
};

// The type of the operand on the other side, whose sizes behind batch and
// channels are an attribute.
TensorType resized(const OpCall& op, std::string_view attribute) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const auto& size = op.attribute<std::vector<int64_t>>(attribute);
  const Shape& shape = op.input(0).shape;
  op.require(!size.empty() && size.size() <= kAxes &&
                 shape.size() == size.size() + 2 && op.input(0).numel() > 0,
             "input 0 has elements, and a batch, channels, and 1 to 3 more "
             "axes, as many as '",
             attribute, "'");
  op.require(op.attribute<std::vector<double>>("scales").size() == size.size(),
             "'scales' has a number for each of these axes");
  const auto fits = [](int64_t length) { return length < kMost; };
  op.require(
      std::ranges::all_of(size, fits) && std::ranges::all_of(shape, fits),
      "no axis is longer than 32 bits can count");
  op.require(!op.attribute<bool>("antialias") ||
                 !op.attribute<std::string>("mode").starts_with("nearest"),
             "only linear and cubic are antialiased");
  Shape result{shape[0], shape[1]};
  result.insert(result.end(), size.begin(), size.end());
  return {op.input(0).dtype, result};
}

// Each element of the longer side takes part in a few sums.
std::vector<graph::Work> resample_work(const OpView& op) {
  const int64_t longer = std::max(op.input(0).numel(), op.output(0).numel());
  const int64_t taps = op.attribute<std::string>("mode") == "cubic" ? 8 : 4;
  return {graph::Elementwise{longer, taps}};
}

}  // namespace

extern const OpDef kResample{
    .name = "resample",
    .schema =
        "resample(Tensor{floats} x, *, int{1..}[] size, float[] scales, "
        "str{nearest, nearest_exact, linear, cubic} mode, "
        "bool align_corners=False, bool antialias=False) -> Tensor",
    .family = "resample",
    .shape =
        [](const OpCall& op) {
          return std::vector<TensorType>{resized(op, "size")};
        },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Resample<false>>(op);
    },
    .work = resample_work,
    .only_overflows = true,
};

extern const OpDef kResampleGrad{
    .name = "resample_grad",
    .schema =
        "resample_grad(Tensor{floats} grad_y, *, int{1..}[] input_size, "
        "float[] scales, str{nearest, nearest_exact, linear, cubic} mode, "
        "bool align_corners=False, bool antialias=False) -> Tensor",
    .family = "resample",
    .shape =
        [](const OpCall& op) {
          return std::vector<TensorType>{resized(op, "input_size")};
        },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Resample<true>>(op);
    },
    .work = resample_work,
    .only_overflows = true,
};

}  // namespace popsim::ops
