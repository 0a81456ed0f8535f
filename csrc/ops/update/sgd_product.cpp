// SGD with a gradient that is a matrix product which no other op reads: the
// weights are updated with each piece of the product while the piece is in
// registers. The gradient is written only if the host reads it.
#include <memory>

#include "dense/matmul.h"
#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/matrices.h"
#include "ops/operands/precision.h"
#include "ops/update/common.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

constexpr size_t kWeight = 0;
constexpr size_t kA = 1;
constexpr size_t kB = 2;

// The strides that a separate product op would use: the bits must be the same.
dense::MatrixStrides strides_of(const graph::Tensor& matrix) {
  return matrices_of(matrix).strides;
}

// w = decay * w - learning_rate * (a @ b)
class SgdProductUpdate final : public Kernel {
 public:
  explicit SgdProductUpdate(const OpView& op)
      : weight_(op.output_id(0)),
        a_(op.input_id(kA)),
        b_(op.input_id(kB)),
        decay_(op, 3),
        learning_rate_(op, 4),
        gradient_(op.has_output(1) ? op.output_id(1) : graph::kNoTensor),
        product_(dense::create_matmul(
            {.m = op.input(kA).shape[0],
             .n = op.input(kB).shape[1],
             .k = op.input(kA).shape[1],
             .a = strides_of(op.input(kA)),
             .b = strides_of(op.input(kB)),
             .significant_bits = significant_bits_in(op, DType::kFloat32),
             .update = true})) {
    check_internal(product_ != nullptr, "sgd_product_update '", op.op().name,
                   "': no code for a product of ",
                   to_string(op.input(kA).shape), " and ",
                   to_string(op.input(kB).shape));
    workspace_.add(product_->workspace_bytes());
  }

  void run(const RunContext& context) override {
    product_->run({.a = context.data<const float>(a_),
                   .b = context.data<const float>(b_),
                   .c = context.data<float>(weight_),
                   .workspace = workspace_.memory(),
                   .rate = learning_rate_.read(context),
                   .decay = decay_.read(context),
                   .sums = gradient_ == graph::kNoTensor
                               ? nullptr
                               : context.data<float>(gradient_)});
  }

 private:
  graph::TensorId weight_;
  graph::TensorId a_;
  graph::TensorId b_;
  update::Scalar decay_;
  update::Scalar learning_rate_;
  graph::TensorId gradient_;
  std::unique_ptr<dense::Matmul> product_;
  Workspace workspace_;
};

std::vector<TensorType> types(const OpCall& op) {
  const Shape& a = op.input(kA).shape;
  const Shape& b = op.input(kB).shape;
  op.require(a.size() == 2 && b.size() == 2 && a[1] == b[0],
             "a and b are matrices that can be multiplied");
  op.require_shape(kWeight, {a[0], b[1]});
  return {op.input_type(kWeight), op.input_type(kWeight)};
}

std::vector<graph::Work> product_work(const OpView& op) {
  const Shape& a = op.input(kA).shape;
  const Shape& b = op.input(kB).shape;
  return {graph::Product{1, a[0], b[1], a[1]},
          graph::Elementwise{a[0] * b[1], 2}};
}

}  // namespace

extern const OpDef kSgdProductUpdate{
    .name = "sgd_product_update",
    .schema =
        "sgd_product_update(Tensor(a!){float32} weight, Tensor{float32} a, "
        "Tensor{float32} b, Tensor{float32} weight_decay_scale_factor0, "
        "Tensor{float32} scaled_learning_rate0, *, "
        "str{bf16, tf32}? precision) -> "
        "(Tensor(a!) weight, Tensor? gradient)",
    .family = "update",
    .shape = types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<SgdProductUpdate>(op);
    },
    .work = product_work,
    .layer = true,
};

}  // namespace popsim::ops
