// Converts float32 to float16 and rounds up or down at random.
#include <algorithm>
#include <array>

#include "base/numbers.h"
#include "ops/math/half_rounding.h"
#include "ops/operands/floats.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr int64_t kBlock = 4 * HalfRounding::kGroup;
constexpr int64_t kCost = 16;  // of an element, in additions

class StochasticRound final : public Kernel {
 public:
  explicit StochasticRound(const OpView& op)
      : rounding_(op.attribute<int64_t>("stream")),
        reader_(op, 0),
        writer_(op, 0),
        numel_(op.output(0).numel()) {}

  void run(const RunContext& context) override {
    const threads::Shares shares(threads::additions(kCost * numel_),
                                 ceil_div(numel_, kBlock));
    shares.run([&](int64_t /*share*/, threads::Range blocks) {
      std::array<float, kBlock> values;
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const int64_t first = block * kBlock;
        const int64_t count = std::min(kBlock, numel_ - first);
        const float* read = reader_.read(context, first, count, values.data());
        if (read != values.data()) std::copy_n(read, count, values.data());
        rounding_.round(context, first, count, values.data());
        writer_.write(context, first, count, values.data());
      }
    });
  }

 private:
  HalfRounding rounding_;
  FloatReader reader_;
  FloatWriter writer_;
  int64_t numel_;
};

}  // namespace

extern const OpDef kStochasticRound{
    .name = "stochastic_round",
    .schema =
        "stochastic_round(Tensor{float32} x, *, int{0..} stream) -> Tensor",
    .family = "random",
    .shape = [](const OpCall& op) -> std::vector<TensorType> {
      return {{DType::kFloat16, op.input(0).shape}};
    },
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<StochasticRound>(op);
    },
    .work = elementwise<kCost>,
    .exact = true,
    .elementwise = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
