// Adds up the accumulated gradients of all processes that train a model
// together, in place, before the update.
#include "ops/exchange.h"
#include "ops/op_def.h"
#include "ops/update/parts.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class ReducedPart {
 public:
  explicit ReducedPart(const OpView& op)
      : numel_(op.input(0).numel()),
        accumulator_(op, 0, 0, op.input(0).shape) {}

  [[nodiscard]] int64_t numel() const { return numel_; }
  // Its elements are those from `start` on of an exchange.
  void begin_at(int64_t start) { start_ = start; }

  void pack(const RunContext& context, int64_t begin, int64_t size,
            float* numbers) const {
    update::Scratch scratch;
    const float* values =
        accumulator_.load(context, begin, size, scratch.data());
    std::copy_n(values, size, numbers + start_ + begin);
  }
  void unpack(const RunContext& context, int64_t begin, int64_t size,
              const float* numbers) const {
    update::Scratch scratch;
    float* values = accumulator_.space(context, begin, scratch.data());
    std::copy_n(numbers + start_ + begin, size, values);
    accumulator_.store(context, begin, size, values);
  }

 private:
  int64_t numel_;
  update::Target accumulator_;
  int64_t start_ = 0;
};

class AllReduce final : public Kernel {
 public:
  explicit AllReduce(const OpView& op) : parts_(op) {
    for (ReducedPart& part : parts_) {
      part.begin_at(numel_);
      numel_ += part.numel();
    }
  }

  void run(const RunContext& context) override {
    if (context.exchange == nullptr) return;
    const std::span<float> numbers = context.exchange->numbers();
    check_internal(std::ssize(numbers) == numel_,
                   "all_reduce: the exchange has ", numbers.size(),
                   " numbers instead of ", numel_);
    parts_.for_each_block(
        [&](const ReducedPart& part, int64_t begin, int64_t size) {
          part.pack(context, begin, size, numbers.data());
        });
    context.exchange->sum();
    parts_.for_each_block(
        [&](const ReducedPart& part, int64_t begin, int64_t size) {
          part.unpack(context, begin, size, numbers.data());
        });
  }

 private:
  update::Parts<ReducedPart> parts_;
  int64_t numel_ = 0;
};

std::vector<TensorType> reduced_types(const OpCall& op) {
  std::vector<TensorType> types;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    types.push_back(op.input_type(i));
  }
  return types;
}

}  // namespace

extern const OpDef kAllReduce{
    .name = "all_reduce",
    .schema =
        "all_reduce[parameters](Tensor(a!){floats} accumulator, *, "
        "int{1..} parameters=1, int{0..}? stream) -> Tensor(a!) accumulator",
    .family = "update",
    .shape = reduced_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AllReduce>(op);
    },
    .work = no_arithmetic,
    .layer = true,
    .only_overflows = true,
    .calls_host = true,
};

}  // namespace popsim::ops
