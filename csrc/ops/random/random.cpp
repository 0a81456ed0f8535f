// Random tensors from counters: an element depends on the seed, the op, the
// micro-batch and its own position, never on threads or on earlier ops.
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <optional>

#include "base/numbers.h"
#include "ops/math/philox.h"
#include "ops/operands/floats.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// Elements are made in groups of kPhiloxLanes counters of four words each, and
// a few groups at a time: word w of lane l is element w * kPhiloxLanes + l.
constexpr int64_t kGroup = 4 * static_cast<int64_t>(kPhiloxLanes);
constexpr int64_t kGroupsPerBatch = 8;
constexpr int64_t kBatch = kGroup * kGroupsPerBatch;
constexpr int64_t kNumberCost = 32;  // in additions

using Vec = at::vec::Vectorized<float>;
using Words = std::array<uint32_t, kBatch>;
using Floats = std::array<float, kBatch>;

enum class Distribution : int8_t { kBernoulli, kUniform, kNormal };

struct RandomSpec {
  Distribution distribution = Distribution::kUniform;
  float first = 0.0f;   // p, from or mean
  float second = 0.0f;  // to - from or std
  float limit = 0.0f;   // uniform: the largest value below `to`
};

// A number in [0, 1) with 24 random bits.
float unit_interval(uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24f;
}

void draw_bernoulli(const Words& words, float p, Floats& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = unit_interval(words[i]) < p ? 1.0f : 0.0f;
  }
}

// Throws UserError unless all are in [0, 1]; NaN is refused.
void check_probabilities(const Floats& p) {
  bool all_valid = true;
  for (const float value : p) {
    all_valid &= value >= 0.0f && value <= 1.0f;
  }
  if (all_valid) return;
  const auto* const wrong = std::find_if_not(
      p.begin(), p.end(),
      [](float value) { return value >= 0.0f && value <= 1.0f; });
  check_user(false, "a probability is ", *wrong, ", it must be in [0, 1]");
}

void draw_bernoulli(const Words& words, const Floats& p, Floats& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = unit_interval(words[i]) < p[i] ? 1.0f : 0.0f;
  }
}

void draw_uniform(const Words& words, const RandomSpec& spec, Floats& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const float value =
        multiply_add(unit_interval(words[i]), spec.second, spec.first);
    out[i] = std::min(value, spec.limit);
  }
}

// Box-Muller: words 0 and 1 of a lane give elements 0 and 1, words 2 and 3 the
// other two.
void draw_normal(const Words& words, const RandomSpec& spec, Floats& out) {
  constexpr size_t kLanes = kPhiloxLanes;
  Floats uniform;
  for (size_t i = 0; i < words.size(); ++i) {
    // The radius is computed from a number in (0, 1], because of the logarithm.
    const bool is_radius = i / kLanes % 2 == 0;
    uniform[i] = is_radius ? static_cast<float>(words[i]) * 0x1p-32f + 0x1p-33f
                           : unit_interval(words[i]);
  }
  const Vec mean(spec.first);
  const Vec std(spec.second);
  const Vec full_turn(2.0f * std::numbers::pi_v<float>);
  for (size_t pair = 0; pair < words.size(); pair += 2 * kLanes) {
    for (size_t i = pair; i < pair + kLanes; i += Vec::size()) {
      const Vec log = Vec::loadu(&uniform[i]).log();
      const Vec radius = (log * Vec(-2.0f)).sqrt() * std;
      const Vec angle = Vec::loadu(&uniform[i + kLanes]) * full_turn;
      at::vec::fmadd(radius, angle.cos(), mean).store(&out[i]);
      at::vec::fmadd(radius, angle.sin(), mean).store(&out[i + kLanes]);
    }
  }
}

class RandomKernel final : public Kernel {
 public:
  RandomKernel(const OpView& op, RandomSpec spec);
  void run(const RunContext& context) override;

 private:
  struct Probabilities {
    graph::TensorId tensor;
    FloatGather gather;
  };

  void draw_words(const RunContext& context, int64_t batch, Words& words) const;
  void draw(const RunContext& context, int64_t batch, Floats& out) const;

  RandomSpec spec_;
  std::optional<Probabilities> probabilities_;
  graph::TensorId out_;
  StoreFloats store_;
  int64_t numel_;
  uint32_t stream_;
};

RandomKernel::RandomKernel(const OpView& op, RandomSpec spec)
    : spec_(spec),
      out_(op.output_id(0)),
      store_(store_floats(op.output(0).dtype)),
      numel_(op.output(0).numel()),
      stream_(static_cast<uint32_t>(op.attribute<int64_t>("stream"))) {
  constexpr int64_t kCounters = int64_t{1} << 32;
  op.require(numel_ <= kCounters * 4,
             "the output does not have too many values");
  if (op.has_input(0)) {
    const graph::Tensor& p = op.input(0);
    const Shape& shape = op.output(0).shape;
    probabilities_.emplace(Probabilities{
        op.input_id(0),
        FloatGather(p.dtype, shape,
                    broadcast_strides(p.shape, p.strides, shape))});
  }
}

void RandomKernel::run(const RunContext& context) {
  const threads::Shares shares(threads::additions(kNumberCost * numel_),
                               ceil_div(numel_, kBatch));
  shares.run([&](int64_t /*share*/, threads::Range batches) {
    Floats values;
    for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
      draw(context, batch, values);
      const int64_t first = batch * kBatch;
      store_(values.data(), false, context.data(out_), first,
             std::min(kBatch, numel_ - first));
    }
  });
}

void RandomKernel::draw_words(const RunContext& context, int64_t batch,
                              Words& words) const {
  const PhiloxKey key{static_cast<uint32_t>(context.seed),
                      static_cast<uint32_t>(context.seed >> 32)};
  const auto step = static_cast<uint64_t>(context.cursor.step);
  auto counter = static_cast<uint32_t>(batch * (kBatch / 4));
  for (auto out = words.begin(); out != words.end();) {
    PhiloxWords group;
    for (size_t i = 0; i < kPhiloxLanes; ++i) {
      group[0][i] = counter + static_cast<uint32_t>(i);
    }
    group[1].fill(stream_);
    group[2].fill(static_cast<uint32_t>(step));
    group[3].fill(static_cast<uint32_t>(step >> 32));
    philox(group, key);
    for (const PhiloxLanes& word : group) {
      out = std::copy(word.begin(), word.end(), out);
    }
    counter += kPhiloxLanes;
  }
}

void RandomKernel::draw(const RunContext& context, int64_t batch,
                        Floats& out) const {
  Words words;
  draw_words(context, batch, words);
  switch (spec_.distribution) {
    case Distribution::kBernoulli:
      if (probabilities_) {
        Floats p{};
        const int64_t first = batch * kBatch;
        probabilities_->gather.read(context.data(probabilities_->tensor), first,
                                    std::min(kBatch, numel_ - first), p.data());
        check_probabilities(p);
        draw_bernoulli(words, p, out);
      } else {
        draw_bernoulli(words, spec_.first, out);
      }
      return;
    case Distribution::kUniform:
      draw_uniform(words, spec_, out);
      return;
    case Distribution::kNormal:
      draw_normal(words, spec_, out);
      return;
  }
}

float next_below(float value) {
  return std::nextafter(value, -std::numeric_limits<float>::infinity());
}

// For the 16-bit dtypes, whose bits are a sign and a magnitude.
template <typename T>
T next_below(T value) {
  constexpr uint16_t kSign = 0x8000;
  if ((value.x & ~kSign) == 0) return T(kSign | 1, T::from_bits());
  const int step = (value.x & kSign) != 0 ? 1 : -1;
  return T(static_cast<uint16_t>(value.x + step), T::from_bits());
}

// The largest number of type T below `bound`.
template <typename T>
float largest_below(double bound) {
  const T nearest(static_cast<float>(bound));
  return nearest < bound ? nearest : next_below(nearest);
}

float largest_below(double bound, DType dtype) {
  if (dtype == DType::kFloat16) return largest_below<at::Half>(bound);
  if (dtype == DType::kBFloat16) return largest_below<at::BFloat16>(bound);
  return largest_below<float>(bound);
}

RandomSpec parse_bernoulli(const OpView& op) {
  RandomSpec spec{.distribution = Distribution::kBernoulli};
  if (op.has_input(0)) return spec;
  const double p = op.attribute<double>("p");
  op.require(p >= 0.0 && p <= 1.0, "p is in [0, 1], not ", p);
  spec.first = static_cast<float>(p);
  return spec;
}

RandomSpec parse_uniform(const OpView& op) {
  const double from = op.attribute<double>("from");
  const double to = op.attribute<double>("to");
  op.require(from <= to, "from <= to, not ", from, " and ", to);
  const auto low = static_cast<float>(from);
  return {.distribution = Distribution::kUniform,
          .first = low,
          .second = static_cast<float>(to - from),
          .limit = std::max(low, largest_below(to, op.output(0).dtype))};
}

RandomSpec parse_normal(const OpView& op) {
  const double std = op.attribute<double>("std");
  op.require(std >= 0.0, "std is at least 0, not ", std);
  return {.distribution = Distribution::kNormal,
          .first = static_cast<float>(op.attribute<double>("mean")),
          .second = static_cast<float>(std)};
}

RandomSpec parse_spec(const OpView& op) {
  const auto& name = op.attribute<std::string>("distribution");
  if (name == "bernoulli") return parse_bernoulli(op);
  if (name == "uniform") return parse_uniform(op);
  if (name == "normal") return parse_normal(op);
  throw InternalError(
      join("random '", op.op().name, "': no distribution '", name, "'"));
}

std::vector<TensorType> random_type(const OpCall& op) {
  const auto& distribution = op.attribute<std::string>("distribution");
  const Shape& shape = op.attribute<std::vector<int64_t>>("shape");
  op.require(is_valid_shape(shape),
             "the output's shape is valid: ", to_string(shape));
  op.require(!op.has_input(0) || distribution == "bernoulli",
             "only bernoulli has probabilities");
  if (op.has_input(0)) op.require_broadcasts(0, shape);
  return {{dtype_from_name(op.attribute<std::string>("dtype")), shape}};
}

std::vector<graph::Work> work(const OpView& op) {
  return {graph::Random{op.output(0).numel()}};
}

}  // namespace

extern const OpDef kRandom{
    .name = "random",
    .schema =
        "random(Tensor{floats}? probabilities, *, "
        "str{bernoulli, uniform, normal} distribution, int{0..}[] shape, "
        "dtype{float32, float16, bfloat16, bool} dtype, float? p, "
        "float? from, float? to, float? mean, float? std, int stream) -> "
        "Tensor",
    .family = "random",
    .shape = random_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<RandomKernel>(op, parse_spec(op));
    },
    .work = work,
    .exact = true,
};

}  // namespace popsim::ops
