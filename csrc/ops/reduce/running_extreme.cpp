// The largest or smallest element up to each position of an axis, and its
// position.
#include <algorithm>
#include <array>

#include "ops/operands/float_operand.h"
#include "ops/reduce/along_axis.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// Whether `next` takes the place of `best`. NaN is the most extreme number; of
// equal ones the last one counts, as in PyTorch.
template <bool kMax>
[[nodiscard]] bool replaces(float next, float best) {
  return next != next || (kMax ? next >= best : next <= best);
}

template <bool kMax, bool kPositions>
class RunningExtreme final : public Kernel {
 public:
  explicit RunningExtreme(const OpView& op)
      : axis_(op, op.output(0).shape, 3),
        x_(op.input_id(0), op.input(0), workspace_),
        y_(op.output_id(0), op.output(0), workspace_),
        positions_(kPositions ? op.output_id(1) : graph::kNoTensor) {}

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* x = x_.load(context, workspace);
    float* y = y_.buffer(context, workspace);
    int64_t* positions =
        kPositions ? context.data<int64_t>(positions_) : nullptr;
    axis_.run([&](int64_t /*share*/, int64_t first, int64_t count) {
      int64_t* at = kPositions ? positions + first : nullptr;
      if (count == 1) {
        follow_column(x + first, y + first, at);
      } else {
        follow_columns(x + first, y + first, at, count);
      }
    });
    y_.store(context, workspace);
  }

 private:
  void follow_column(const float* x, float* y, int64_t* positions) const {
    const int64_t step = axis_.inner();
    if (axis_.size() == 0) return;
    float best = x[0];
    int64_t position = 0;
    for (int64_t k = 0; k < axis_.size(); ++k) {
      const float next = x[k * step];
      // A jump, because most elements are not new, and a choice takes longer.
      const bool stays = kMax ? next < best : next > best;
      if (!stays) [[unlikely]] {
        if (k == 0 || replaces<kMax>(next, best)) {
          best = next;
          position = k;
        }
      }
      y[k * step] = best;
      if constexpr (kPositions) positions[k * step] = position;
    }
  }

  void follow_columns(const float* x, float* y, int64_t* positions,
                      int64_t count) const {
    const int64_t step = axis_.inner();
    std::array<float, AlongAxis::kColumns> best;
    std::array<int64_t, AlongAxis::kColumns> at{};
    if (axis_.size() > 0) std::copy_n(x, count, best.begin());
    for (int64_t k = 0; k < axis_.size(); ++k) {
      const int64_t row = k * step;
      for (int64_t i = 0; i < count; ++i) {
        const auto column = static_cast<size_t>(i);
        const float next = x[row + i];
        const bool is_new = replaces<kMax>(next, best[column]);
        best[column] = is_new ? next : best[column];
        at[column] = is_new ? k : at[column];
        y[row + i] = best[column];
        if constexpr (kPositions) positions[row + i] = at[column];
      }
    }
  }

  AlongAxis axis_;
  Workspace workspace_;
  FloatInput x_;
  FloatOutput y_;
  graph::TensorId positions_;
};

template <bool kMax>
std::unique_ptr<Kernel> running_extreme(const OpView& op) {
  if (op.has_output(1)) return std::make_unique<RunningExtreme<kMax, true>>(op);
  return std::make_unique<RunningExtreme<kMax, false>>(op);
}

std::vector<TensorType> running_extreme_types(const OpCall& op) {
  require_axis(op);
  return {op.input_type(0), {DType::kInt64, op.input(0).shape}};
}

}  // namespace

extern const OpDef kRunningExtreme{
    .name = "running_extreme",
    .schema =
        "running_extreme(Tensor{floats} x, *, int{0..} axis, "
        "str{max, min} function) -> (Tensor y, Tensor? positions)",
    .family = "reduce",
    .shape = running_extreme_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      if (op.attribute<std::string>("function") == "max") {
        return running_extreme<true>(op);
      }
      return running_extreme<false>(op);
    },
    .work = elementwise<2>,
    .exact = true,
};

}  // namespace popsim::ops
