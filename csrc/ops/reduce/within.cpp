// Ends the run if an element of a tensor is NaN or out of range: what eager
// PyTorch checks before it computes with the values.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>

#include "ops/op_def.h"
#include "ops/operands/strided_walk.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

struct Bounds {
  float least;
  float most;
};

// Whether one of some elements is NaN or out of range.
template <typename T>
bool any_outside(const void* start, const StridedWalk& walk,
                 threads::Range range, Bounds bounds) {
  const auto* values = static_cast<const T*>(start);
  int32_t outside = 0;
  const auto look = [&](int64_t position) {
    const auto value = static_cast<float>(values[position]);
    // Both comparisons of NaN are false. (No branches, so that the loop has
    // vectors.)
    outside |= 1 - (static_cast<int32_t>(value >= bounds.least) &
                    static_cast<int32_t>(value <= bounds.most));
  };
  walk.for_each_run(range.begin, range.end - range.begin,
                    [&](int64_t offset, int64_t stride, int64_t length) {
                      if (stride == 1) {
                        for (int64_t i = 0; i < length; ++i) look(offset + i);
                        return;
                      }
                      for (int64_t i = 0; i < length; ++i) {
                        look(offset + i * stride);
                      }
                    });
  return outside != 0;
}

class Within final : public Kernel {
 public:
  explicit Within(const OpView& op)
      : x_(op.input_id(0)),
        walk_(op.input(0).shape, op.input(0).strides),
        tasks_(threads::elements(op.input(0).numel()), op.input(0).numel()),
        bounds_{static_cast<float>(op.attribute<double>("least")),
                static_cast<float>(op.attribute<double>("most"))},
        message_(op.attribute<std::string>("message")),
        any_outside_(function_for(op.input(0).dtype)) {}

  void run(const RunContext& context) override {
    const void* const start = context.data(x_);
    std::array<bool, threads::Tasks::kMax> outside{};
    tasks_.run([&](int64_t task, threads::Range range) {
      if (range.end == range.begin) return;
      outside[static_cast<size_t>(task)] =
          any_outside_(start, walk_, range, bounds_);
    });
    if (std::ranges::find(outside, true) != outside.end()) {
      throw UserError(message_);
    }
  }

 private:
  using Function = bool (*)(const void*, const StridedWalk&, threads::Range,
                            Bounds);

  static Function function_for(DType dtype) {
    switch (dtype) {
      case DType::kFloat16:
        return any_outside<c10::Half>;
      case DType::kBFloat16:
        return any_outside<c10::BFloat16>;
      default:
        return any_outside<float>;
    }
  }

  graph::TensorId x_;
  StridedWalk walk_;
  threads::Tasks tasks_;
  Bounds bounds_;
  std::string message_;
  Function any_outside_;
};

std::vector<graph::Work> within_work(const OpView& op) {
  return {graph::Reduce{.elements = op.input(0).numel()}};
}

}  // namespace

extern const OpDef kWithin{
    .name = "within",
    .schema =
        "within(Tensor{floats} x, *, float least, float "
        "most, str message) -> ()",
    .family = "reduce",
    .shape = [](const OpCall&) -> std::vector<TensorType> { return {}; },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Within>(op);
    },
    .work = within_work,
};

}  // namespace popsim::ops
