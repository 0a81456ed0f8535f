// Ends the device iteration if a tensor has NaN or an infinity.
//
// It runs before the update and after it. Before the update, the weights are
// still those of the last iteration. If gradients are so large that the update
// itself may overflow, or if a divisor is zero, the op copies what the update
// changes. In this case the op after the update checks the new values, and puts
// the old ones back if it fails.
//
// A late check of a micro-batch only notes the bad tensor, and the next other
// check fails: until then the micro-batches enqueue all that they compute.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "ops/number_checks.h"
#include "ops/op_def.h"
#include "ops/operands/strided_walk.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

// The largest of some numbers without their signs, as bits: in this form the
// order of floating-point numbers is that of integers, and NaN and infinity
// come after all numbers.
template <typename Bits>
int64_t largest_bits(const void* start, const StridedWalk& walk, int64_t first,
                     int64_t count) {
  constexpr Bits kWithoutSign = std::numeric_limits<Bits>::max();
  const auto* values = static_cast<const Bits*>(start);
  Bits largest = 0;
  walk.for_each_run(
      first, count, [&](int64_t offset, int64_t stride, int64_t length) {
        const Bits* run = values + offset;
        if (stride == 1) {
          for (int64_t i = 0; i < length; ++i) {
            largest = std::max<Bits>(largest, run[i] & kWithoutSign);
          }
          return;
        }
        for (int64_t i = 0; i < length; ++i) {
          largest = std::max<Bits>(largest, run[i * stride] & kWithoutSign);
        }
      });
  return largest;
}

float magnitude_of(DType dtype, int64_t bits) {
  switch (dtype) {
    case DType::kFloat16:
      return c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits());
    case DType::kBFloat16:
      return c10::BFloat16(static_cast<uint16_t>(bits),
                           c10::BFloat16::from_bits());
    default: {
      const auto narrow = static_cast<int32_t>(bits);
      float value = 0;
      std::memcpy(&value, &narrow, sizeof(value));
      return value;
    }
  }
}

// A walk over the elements in the order of their addresses.
StridedWalk walk_in_memory(const graph::Tensor& tensor) {
  std::vector<size_t> axes(tensor.shape.size());
  std::iota(axes.begin(), axes.end(), size_t{0});
  std::ranges::stable_sort(axes, std::ranges::greater{},
                           [&](size_t axis) { return tensor.strides[axis]; });
  Shape shape;
  Strides strides;
  for (const size_t axis : axes) {
    shape.push_back(tensor.shape[axis]);
    strides.push_back(tensor.strides[axis]);
  }
  return {shape, strides};
}

// A tensor of which the largest number is wanted.
class MagnitudeInput {
 public:
  MagnitudeInput(const OpView& op, size_t input)
      : id_(op.input_id(input)),
        name_(op.input(input).name),
        dtype_(op.input(input).dtype),
        bytes_(static_cast<size_t>(op.input(input).bytes())),
        walk_(walk_in_memory(op.input(input))),
        tasks_(threads::elements(op.input(input).numel()),
               op.input(input).numel()) {}

  // The largest magnitude; NaN or infinity if there is one.
  [[nodiscard]] float read(const RunContext& context) const {
    const void* start = context.data(id_);
    std::array<int64_t, threads::Tasks::kMax> found{};
    tasks_.run([&](int64_t task, threads::Range range) {
      const int64_t count = range.end - range.begin;
      if (count == 0) return;
      found[static_cast<size_t>(task)] =
          dtype_ == DType::kFloat32
              ? largest_bits<int32_t>(start, walk_, range.begin, count)
              : largest_bits<int16_t>(start, walk_, range.begin, count);
    });
    return magnitude_of(dtype_, *std::ranges::max_element(found));
  }

  [[nodiscard]] NumberChecks::Copy copy(const RunContext& context) const {
    auto* const memory = context.data<std::byte>(id_);
    return {memory, std::vector<std::byte>(memory, memory + bytes_)};
  }

  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  graph::TensorId id_;
  std::string name_;
  DType dtype_;
  size_t bytes_;
  StridedWalk walk_;
  threads::Tasks tasks_;
};

class Finite final : public Kernel {
 public:
  explicit Finite(const OpView& op)
      : after_(op.attribute<bool>("after")),
        late_(op.attribute<bool>("late")),
        limit_(static_cast<float>(op.attribute<double>("limit"))) {
    const auto num_kept = static_cast<size_t>(op.attribute<int64_t>("kept"));
    const auto num_divisors =
        static_cast<size_t>(op.attribute<int64_t>("divisors"));
    const size_t num_checked = op.num_inputs() - num_kept - num_divisors;
    for (size_t i = 0; i < op.num_inputs(); ++i) {
      std::vector<MagnitudeInput>& group =
          i < num_checked ? checked_
                          : (i < num_checked + num_kept ? kept_ : divisors_);
      group.emplace_back(op, i);
    }
  }

  void run(const RunContext& context) override {
    NumberChecks* const checks = context.checks;
    if (checks == nullptr || !checks->on) return;
    const std::string* const noticed = checks->noticed;
    if (noticed != nullptr && !late_) fail(*checks, *noticed);
    if (after_ && checks->copies.empty()) return;
    bool may_fail = false;
    for (const MagnitudeInput& input : checked_) {
      const float largest = input.read(context);
      if (!std::isfinite(largest)) {
        if (!late_) fail(*checks, input.name());
        checks->noticed = &input.name();
      }
      may_fail = may_fail || largest > limit_;
    }
    if (after_) return;
    for (const MagnitudeInput& divisor : divisors_) {
      may_fail = may_fail || divisor.read(context) == 0;
    }
    if (!may_fail) return;
    for (const MagnitudeInput& input : kept_) {
      checks->copies.push_back(input.copy(context));
    }
  }

 private:
  [[noreturn]] void fail(NumberChecks& checks, const std::string& name) const {
    if (after_) {
      for (const NumberChecks::Copy& copy : checks.copies) {
        std::memcpy(copy.memory, copy.bytes.data(), copy.bytes.size());
      }
    }
    throw BadNumber(join("'", name, "' has NaN or an infinity"));
  }

  bool after_;
  bool late_;
  float limit_;
  std::vector<MagnitudeInput> checked_;
  std::vector<MagnitudeInput> kept_;
  std::vector<MagnitudeInput> divisors_;
};

std::vector<TensorType> finite_types(const OpCall& op) {
  op.require(op.op().phase != graph::Phase::kSetup,
             "the op runs in every run, not in the setup phase");
  op.require(
      op.attribute<int64_t>("kept") + op.attribute<int64_t>("divisors") <=
          std::ssize(op.op().inputs),
      "the kept tensors and the divisors are inputs");
  return {};
}

std::vector<graph::Work> finite_work(const OpView& op) {
  graph::Reduce checks;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    checks.elements += op.input(i).numel();
  }
  return {checks};
}

}  // namespace

extern const OpDef kFinite{
    .name = "finite",
    .schema =
        "finite(Tensor{floats}[] x, *, int{0..} kept, int{0..} divisors, "
        "float limit, bool after, bool late) -> ()",
    .family = "reduce",
    .shape = finite_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Finite>(op);
    },
    .work = finite_work,
};

}  // namespace popsim::ops
