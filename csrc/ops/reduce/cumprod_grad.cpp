// The gradient of running products.
//
// The gradient of x[k] is the product of all elements before it, times the sum
// over i >= k of the gradient of y[i] times the product of x[k + 1 .. i]. These
// sums follow from each other, from the last one to the first one. So there are
// no divisions, and zeros are no special case.
#include <algorithm>
#include <array>

#include "ops/operands/float_operand.h"
#include "ops/reduce/along_axis.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class CumprodGrad final : public Kernel {
 public:
  explicit CumprodGrad(const OpView& op)
      : axis_(op, op.output(0).shape, 4),
        gradient_(op.input_id(0), op.input(0), workspace_),
        x_(op.input_id(1), op.input(1), workspace_),
        y_(op.input_id(2), op.input(2), workspace_),
        out_(op.output_id(0), op.output(0), workspace_) {}

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    const float* gradient = gradient_.load(context, workspace);
    const float* x = x_.load(context, workspace);
    const float* y = y_.load(context, workspace);
    float* out = out_.buffer(context, workspace);
    axis_.run([&](int64_t /*share*/, int64_t first, int64_t count) {
      const int64_t step = axis_.inner();
      std::array<double, AlongAxis::kColumns> sums{};
      for (int64_t k = axis_.size() - 1; k >= 0; --k) {
        const int64_t row = first + k * step;
        for (int64_t i = 0; i < count; ++i) {
          double& sum = sums[static_cast<size_t>(i)];
          const double before =
              k > 0 ? static_cast<double>(y[row - step + i]) : 1.0;
          sum += static_cast<double>(gradient[row + i]);
          out[row + i] = static_cast<float>(before * sum);
          sum *= static_cast<double>(x[row + i]);
        }
      }
    });
    out_.store(context, workspace);
  }

 private:
  AlongAxis axis_;
  Workspace workspace_;
  FloatInput gradient_;
  FloatInput x_;
  FloatInput y_;
  FloatOutput out_;
};

std::vector<TensorType> cumprod_grad_type(const OpCall& op) {
  require_axis(op);
  op.require_shape(1, op.input(0).shape);
  op.require_shape(2, op.input(0).shape);
  return {op.input_type(1)};
}

}  // namespace

extern const OpDef kCumprodGrad{
    .name = "cumprod_grad",
    .schema =
        "cumprod_grad(Tensor{floats} gradient, Tensor{floats} x, "
        "Tensor{floats} y, *, int{0..} axis) -> Tensor",
    .family = "reduce",
    .shape = cumprod_grad_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<CumprodGrad>(op);
    },
    .work = elementwise<4>,
    .only_overflows = true,
};

}  // namespace popsim::ops
