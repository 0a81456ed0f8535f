// The norm of all gradients of a model together, as in
// torch.nn.utils.clip_grad_norm_.
#include "ops/op_def.h"
#include "ops/update/common.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

// Gradients are multiplied by the loss scale, and are sums over micro-batches
// and replicas; the norm is that of the true gradient.
class GradientNorm final : public Kernel {
 public:
  explicit GradientNorm(const OpView& op)
      : loss_scaling_(op, op.num_inputs() - 1),
        output_(op.output_id(0)),
        divisor_(op.attribute<double>("divisor")) {
    for (size_t i = 0; i + 1 < op.num_inputs(); ++i) {
      gradients_.emplace_back(op, i, op.input(i).shape);
      const int64_t numel = op.input(i).numel();
      for (int64_t begin = 0; begin < numel; begin += update::kBlock) {
        blocks_.push_back({i, begin, std::min(update::kBlock, numel - begin)});
      }
    }
    sums_.resize(blocks_.size());
  }

  void run(const RunContext& context) override {
    const auto num_blocks = static_cast<int64_t>(blocks_.size());
    const threads::Shares shares(threads::elements(num_blocks * update::kBlock),
                                 num_blocks);
    shares.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        const auto index = static_cast<size_t>(i);
        sums_[index] = block_sum(context, blocks_[index]);
      }
    });
    double sum = 0.0;
    for (const double block : sums_) sum += block;
    const double scale = std::abs(loss_scaling_.read(context)) * divisor_;
    context.data<float>(output_)[0] =
        static_cast<float>(std::sqrt(sum) / scale);
  }

 private:
  struct Block {
    size_t gradient;
    int64_t begin;
    int64_t size;
  };

  [[nodiscard]] double block_sum(const RunContext& context,
                                 const Block& block) const {
    update::Scratch scratch;
    return update::sum_of_squares(
        gradients_[block.gradient].read(context, block.begin, block.size,
                                        scratch.data()),
        block.size);
  }

  std::vector<update::Source> gradients_;
  update::Scalar loss_scaling_;
  graph::TensorId output_;
  double divisor_;
  std::vector<Block> blocks_;
  std::vector<double> sums_;  // by block
};

std::vector<graph::Work> norm_work(const OpView& op) {
  graph::Reduce squares;
  for (size_t i = 0; i + 1 < op.num_inputs(); ++i) {
    squares.elements += 2 * op.input(i).numel();
  }
  return {squares};
}

}  // namespace

extern const OpDef kGradientNorm{
    .name = "gradient_norm",
    .schema =
        "gradient_norm(Tensor{floats}[] gradients, "
        "Tensor{float32} loss_scaling, *, float divisor) -> Tensor norm",
    .family = "update",
    .shape = [](const OpCall&) -> std::vector<TensorType> {
      return {{DType::kFloat32, {}}};
    },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<GradientNorm>(op);
    },
    .work = norm_work,
    .layer = true,
};

}  // namespace popsim::ops
