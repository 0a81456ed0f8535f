// Adds up the gradients of all micro-batches of a device iteration.
#include "ops/op_def.h"
#include "ops/update/common.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using update::Scratch;

class Accumulate final : public Kernel {
 public:
  explicit Accumulate(const OpView& op)
      : gradient_(op, 0, op.input(1).shape),
        accumulator_(op, 1, 0, op.input(1).shape),
        numel_(op.input(1).numel()),
        running_(op.attribute<bool>("running")) {}

  void run(const RunContext& context) override {
    // The first micro-batch overwrites the sum of the previous update.
    if (context.cursor.accumulation_step == 0) {
      overwrite(context);
      return;
    }
    const auto seen = static_cast<float>(context.cursor.accumulation_step);
    const float keep = running_ ? seen / (seen + 1.0F) : 1.0F;
    const float add = running_ ? 1.0F / (seen + 1.0F) : 1.0F;
    update::for_each_block(numel_, [&](int64_t begin, int64_t size) {
      Scratch gradient_scratch;
      Scratch accumulator_scratch;
      const float* g =
          gradient_.read(context, begin, size, gradient_scratch.data());
      float* acc =
          accumulator_.load(context, begin, size, accumulator_scratch.data());
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        acc[i] = multiply_add(add, g[i], keep * acc[i]);
      }
      accumulator_.store(context, begin, size, acc);
    });
  }

 private:
  void overwrite(const RunContext& context) {
    update::for_each_block(numel_, [&](int64_t begin, int64_t size) {
      Scratch scratch;
      float* acc = accumulator_.space(context, begin, scratch.data());
      const float* g = gradient_.read(context, begin, size, acc);
      if (g != acc) std::copy_n(g, size, acc);
      accumulator_.store(context, begin, size, acc);
    });
  }

  update::Source gradient_;
  update::Target accumulator_;
  int64_t numel_;
  bool running_;
};

}  // namespace

extern const OpDef kAccumulate{
    .name = "accumulate",
    .schema =
        "accumulate(Tensor{floats} gradient, Tensor(a!){floats} accumulator, "
        "*, bool running, int{0..}? stream) -> Tensor(a!) accumulator",
    .family = "update",
    .shape = update::accumulated_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Accumulate>(op);
    },
    .work = elementwise<2>,
    .begins_anew = true,
    .layer = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
