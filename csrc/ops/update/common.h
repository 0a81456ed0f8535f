// What the optimizer's kernels share: operands seen as float32 in blocks,
// loops over blocks whose results do not depend on the number of threads, and
// checks of the operands.
//
// Every update op has, for each of its parameters (parts.h), inputs
// [weight, gradient, states..., scalars...] and, if it has the attribute
// "max_grad_norm", the global gradient norm as the last one. Its outputs are
// [weight, states...], views of the whole of the same tensors, and after them
// terms: what the op computes in passing, where somebody looks at it. Scalars
// are float32 tensors with one element. With the attribute "stream" what an op
// writes as float16 is rounded at random (half_rounding.h), output i with the
// stream of that number plus i.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/math/half_rounding.h"
#include "ops/operands/floats.h"
#include "threads/tasks.h"

namespace popsim::ops::update {

// Elements converted and computed at a time; a handful of blocks fits in L1.
inline constexpr int64_t kBlock = 512;

[[nodiscard]] inline int64_t num_blocks(int64_t numel) {
  return ceil_div(numel, kBlock);
}

// The work of an update of so many elements, which reads and writes at least
// two tensors.
[[nodiscard]] inline threads::Work work_of(int64_t numel) {
  return threads::elements(2 * numel);
}

// Calls body(begin, size) for each block of [0, numel). Blocks start at
// multiples of kBlock whatever the number of threads, so that results do not
// depend on it.
template <typename Body>
void for_each_block(int64_t numel, const Body& body) {
  const threads::Shares shares(work_of(numel), num_blocks(numel));
  shares.run([&](int64_t /*share*/, threads::Range blocks) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const int64_t begin = block * kBlock;
      body(begin, std::min(kBlock, numel - begin));
    }
  });
}

// --- arithmetic ---------------------------------------------------------

// Replaces each element by its square root.
void square_roots(float* values, int64_t size);

// Sum of squares of at most a block, always added in the same order.
[[nodiscard]] double sum_of_squares(const float* values, int64_t size);

// A velocity that also adds the gradients up, after one more of them. Rounds
// twice, as what shows it on the way does (lowering/update_terms.py).
[[nodiscard]] inline float with_gradient(float velocity, float dampening,
                                         float gradient) {
  return velocity + dampening * gradient;
}

// --- operands -----------------------------------------------------------

// Memory for one block of an operand that is not float32. A little longer than
// a block, so that several of them do not start at the same place of a page:
// processors take a load for one of a store that is 4096 bytes away.
using Scratch = std::array<float, kBlock + 48>;

inline void check_floating(const OpView& op, const graph::Tensor& tensor) {
  check_internal(
      tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kFloat16 ||
          tensor.dtype == DType::kBFloat16,
      op.op().kind, " '", op.op().name, "': '", tensor.name, "' has dtype ",
      name_of(tensor.dtype), ", expected float32, float16 or bfloat16");
}

// A gradient: read only, of any strides.
class Source {
 public:
  // The tensor at `input` must have the shape `shape`.
  Source(const OpView& op, size_t input, const Shape& shape)
      : reader_(op, input) {
    const graph::Tensor& tensor = op.input(input);
    check_floating(op, tensor);
    check_internal(tensor.shape == shape, op.op().kind, " '", op.op().name,
                   "': '", tensor.name, "' has shape ", to_string(tensor.shape),
                   ", expected ", to_string(shape));
  }

  // Elements [begin, begin + size) in row-major order: in place if possible,
  // otherwise converted into `scratch`.
  [[nodiscard]] const float* read(const RunContext& context, int64_t begin,
                                  int64_t size, float* scratch) const {
    return reader_.read(context, begin, size, scratch);
  }

 private:
  FloatReader reader_;
};

// A tensor that is read and written: the weight or a state. Input and output
// are normally the same memory.
class Target {
 public:
  Target(const OpView& op, size_t input, size_t output, const Shape& shape)
      : input_(op.input_id(input)),
        load_(load_floats(op.input(input).dtype)),
        writer_(op.output_id(output), op.input(input).dtype) {
    for (const graph::Tensor* tensor : {&op.input(input), &op.output(output)}) {
      check_floating(op, *tensor);
      check_internal(tensor->shape == shape && tensor->contiguous() &&
                         tensor->dtype == op.input(input).dtype,
                     op.op().kind, " '", op.op().name, "': '", tensor->name,
                     "' must be contiguous, of shape ", to_string(shape),
                     " and of the same dtype before and after the "
                     "update");
    }
    if (op.has_attribute("stream") &&
        op.output(output).dtype == DType::kFloat16) {
      rounding_.emplace(op.attribute<int64_t>("stream") +
                        static_cast<int64_t>(output));
    }
  }

  // Elements [begin, begin + size) for reading and writing. For float32 this
  // is the output's memory itself, else `scratch`.
  [[nodiscard]] float* load(const RunContext& context, int64_t begin,
                            int64_t size, float* scratch) const {
    float* values = space(context, begin, scratch);
    if (!writer_.in_place() ||
        context.data<const float>(input_) + begin != values) {
      load_(context.data(input_), begin, /*stride=*/1, size, values);
    }
    return values;
  }

  // Where to put elements that are not read before.
  [[nodiscard]] float* space(const RunContext& context, int64_t begin,
                             float* scratch) const {
    return writer_.space(context, begin, scratch);
  }

  // Writes what load() or space() gave, rounded to the element type.
  void store(const RunContext& context, int64_t begin, int64_t size,
             const float* values) const {
    if (!rounding_) {
      writer_.store(context, begin, size, values);
      return;
    }
    Scratch rounded;
    std::copy_n(values, size, rounded.data());
    rounding_->round(context, begin, size, rounded.data());
    writer_.store(context, begin, size, rounded.data());
  }

 private:
  graph::TensorId input_;
  LoadFloats load_;
  FloatWriter writer_;
  std::optional<HalfRounding> rounding_;
};

// What an op computes in passing: a float32 output that is left out where
// nobody looks at it.
class Term {
 public:
  Term(const OpView& op, size_t output)
      : id_(op.has_output(output) ? op.output_id(output) : graph::kNoTensor) {}

  [[nodiscard]] bool is_wanted() const { return id_ != graph::kNoTensor; }

  // Where to put elements from `begin` on: into the output, else `scratch`.
  [[nodiscard]] float* space(const RunContext& context, int64_t begin,
                             float* scratch) const {
    return is_wanted() ? context.data<float>(id_) + begin : scratch;
  }

 private:
  graph::TensorId id_;
};

// A hyper-parameter.
class Scalar {
 public:
  Scalar(const OpView& op, size_t input) : id_(op.input_id(input)) {
    const graph::Tensor& tensor = op.input(input);
    check_internal(tensor.dtype == DType::kFloat32 && tensor.numel() == 1,
                   op.op().kind, " '", op.op().name, "': scalar '", tensor.name,
                   "' must have one float32 value");
  }

  [[nodiscard]] float read(const RunContext& context) const {
    return context.data<const float>(id_)[0];
  }

 private:
  graph::TensorId id_;
};

// The factor that brings the global norm of the gradients down to
// "max_grad_norm".
class Clip {
 public:
  // `input`: position of the norm, read if the op has the attribute.
  Clip(const OpView& op, size_t input) {
    if (!op.has_attribute("max_grad_norm")) return;
    max_ = static_cast<float>(op.attribute<double>("max_grad_norm"));
    norm_.emplace(op, input);
  }

  [[nodiscard]] float factor(const RunContext& context) const {
    if (!norm_) return 1.0F;
    const float norm = norm_->read(context);
    // A norm that is NaN makes the factor NaN.
    return norm <= max_ ? 1.0F : max_ / norm;
  }

 private:
  float max_ = 0.0F;
  std::optional<Scalar> norm_;
};

// --- checks -------------------------------------------------------------

// The type of the accumulator, where the inputs are [gradient, accumulator,
// ...].
[[nodiscard]] inline std::vector<TensorType> accumulated_type(
    const OpCall& op) {
  op.require_shape(0, op.input(1).shape);
  return {op.input_type(1)};
}

}  // namespace popsim::ops::update
