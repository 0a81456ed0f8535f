// The common code of the optimizer's kernels: operands as blocks of float32,
// loops over blocks whose results do not depend on the number of threads, and
// checks of the operands.
//
// Every update op has, for each of its parameters (parts.h), inputs [weight,
// gradient, states..., scalars...] and, if it has the attribute
// "max_grad_norm", the global gradient norm as the last one. Its outputs are
// [weight, states...], which are views of these whole tensors, and after them
// terms: values that the op also computes, written only if they are read.
// Scalars are float32 tensors with one element. With the attribute "stream",
// float16 outputs are rounded at random (half_rounding.h); output i has the
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

// Number of elements converted and computed at a time; a few blocks fit in L1.
inline constexpr int64_t kBlock = 512;

[[nodiscard]] inline int64_t num_blocks(int64_t numel) {
  return ceil_div(numel, kBlock);
}

// The work of an update of this number of elements, which reads and writes at
// least two tensors.
[[nodiscard]] inline threads::Work work_of(int64_t numel) {
  return threads::elements(2 * numel);
}

// Calls body(begin, size) for each block of [0, numel). Blocks start at
// multiples of kBlock for any number of threads, so the results do not depend
// on it.
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

// Adds a gradient to a velocity that is also the accumulator of the gradients.
// Rounds twice, because the ops that show the intermediate value round twice
// (lowering/update_terms.py).
[[nodiscard]] inline float with_gradient(float velocity, float dampening,
                                         float gradient) {
  return velocity + dampening * gradient;
}

// --- operands -----------------------------------------------------------

// Memory for one block of an operand that is not float32. It is a little longer
// than a block, so that several of them do not start at the same offset in a
// page: processors confuse loads and stores whose addresses differ by a
// multiple of 4096 bytes.
using Scratch = std::array<float, kBlock + 48>;

inline void check_floating(const OpView& op, const graph::Tensor& tensor) {
  check_internal(
      tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kFloat16 ||
          tensor.dtype == DType::kBFloat16,
      op.op().kind, " '", op.op().name, "': '", tensor.name, "' has dtype ",
      name_of(tensor.dtype), ", expected float32, float16 or bfloat16");
}

// A gradient: only read, with any strides.
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

  // Returns elements [begin, begin + size) in row-major order: in place if
  // possible, otherwise converted in `scratch`.
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

  // Loads elements [begin, begin + size) for reading and writing. For float32
  // this is the output's memory itself, otherwise `scratch`.
  [[nodiscard]] float* load(const RunContext& context, int64_t begin,
                            int64_t size, float* scratch) const {
    float* values = space(context, begin, scratch);
    if (!writer_.in_place() ||
        context.data<const float>(input_) + begin != values) {
      load_(context.data(input_), begin, /*stride=*/1, size, values);
    }
    return values;
  }

  // The memory for elements that are not read first.
  [[nodiscard]] float* space(const RunContext& context, int64_t begin,
                             float* scratch) const {
    return writer_.space(context, begin, scratch);
  }

  // Writes the contents of load() or space(), rounded to the dtype.
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

// A value that an op also computes: a float32 output that is left out if it is
// not read.
class Term {
 public:
  Term(const OpView& op, size_t output)
      : id_(op.has_output(output) ? op.output_id(output) : graph::kNoTensor) {}

  [[nodiscard]] bool is_wanted() const { return id_ != graph::kNoTensor; }

  // The memory for elements from `begin` on: in the output, or in `scratch`.
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

// The factor that reduces the global norm of the gradients to "max_grad_norm".
class Clip {
 public:
  // `input` is the position of the norm, which is read if the op has the
  // attribute.
  Clip(const OpView& op, size_t input) {
    if (!op.has_attribute("max_grad_norm")) return;
    max_ = static_cast<float>(op.attribute<double>("max_grad_norm"));
    norm_.emplace(op, input);
  }

  [[nodiscard]] float factor(const RunContext& context) const {
    if (!norm_) return 1.0F;
    const float norm = norm_->read(context);
    // If the norm is NaN, the factor is NaN.
    return norm <= max_ ? 1.0F : max_ / norm;
  }

 private:
  float max_ = 0.0F;
  std::optional<Scalar> norm_;
};

// --- checks -------------------------------------------------------------

// The type of the accumulator, for the inputs [gradient, accumulator, ...].
[[nodiscard]] inline std::vector<TensorType> accumulated_type(
    const OpCall& op) {
  op.require_shape(0, op.input(1).shape);
  return {op.input_type(1)};
}

}  // namespace popsim::ops::update
