// The common part of the forward and the backward op of a recurrent layer.
//
// One layer in one direction: x of shape (steps, batch, inputs), weights as in
// PyTorch, (gates * hidden, inputs) and (gates * hidden, hidden).
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "dense/problem/matmul.h"
#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/recurrent/cells.h"

namespace popsim::ops::recurrent {

struct Dims {
  DType dtype = DType::kFloat32;
  int64_t steps = 0;
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t hidden = 0;
  int64_t gates = 0;
  bool reverse = false;
  bool half_partials = false;
  // That products must use.
  int significant_bits = 24;

  [[nodiscard]] int64_t rows() const { return steps * batch; }
  // For products of rows of this length.
  [[nodiscard]] std::optional<dense::Passes> passes(int64_t depth) const {
    if (!half_partials) return std::nullopt;
    return dense::passes_of(depth);
  }
  [[nodiscard]] int64_t gate_columns() const { return gates * hidden; }
  [[nodiscard]] int64_t state_floats() const { return batch * hidden; }
  [[nodiscard]] int64_t gate_floats() const { return rows() * gate_columns(); }
  // The step with number `index` in the order of the layer, and the step before
  // it, which does not exist for index 0.
  [[nodiscard]] int64_t step(int64_t index) const {
    return reverse ? steps - 1 - index : index;
  }
  [[nodiscard]] int64_t step_before(int64_t index) const {
    return step(index - 1);
  }
};

// Positions of x and of the two weights among the inputs.
struct Operands {
  size_t x;
  size_t weight_input;
  size_t weight_hidden;
};
// Throws InternalError if the shapes of the operands do not fit.
[[nodiscard]] Dims dims_of(const OpCall& op, const Operands& operands);
// The values that the cells of a mode keep for every step.
struct Kept {
  bool gates;
  bool state;       // the cell state of an LSTM, a part of a gate of a GRU
  bool cell_state;  // it begins with c0
};
[[nodiscard]] Kept kept_by(const OpCall& op);
// The work of the products and the cells of all steps.
[[nodiscard]] std::vector<graph::Work> layer_work(const Dims& dims);
// Throws InternalError if an input is missing although it is `wanted`, is given
// although it is not, or has another shape.
void check_input(const OpCall& op, size_t input, bool wanted,
                 const Shape& shape);

[[nodiscard]] int64_t num_gates(std::string_view mode);

// Calls function(cell) with the cell type of the op's mode.
template <typename Function>
auto with_cell(const OpCall& op, Function&& function) {
  const std::string_view mode = op.attribute<std::string>("mode");
  if (mode == "lstm") return function(Lstm{});
  if (mode == "gru") return function(Gru{});
  if (mode == "rnn_relu") return function(RnnRelu{});
  return function(RnnTanh{});
}

// float32 scratch memory.
class Scratch {
 public:
  Scratch(int64_t floats, Workspace& workspace)
      : offset_(workspace.add(static_cast<size_t>(floats) * sizeof(float))) {}
  [[nodiscard]] float* in(char* workspace) const {
    return reinterpret_cast<float*>(workspace + offset_);
  }

 private:
  size_t offset_;
};

// An input that may be left out.
class MaybeInput {
 public:
  MaybeInput(const OpView& op, size_t i, Workspace& workspace) {
    if (op.has_input(i)) {
      input_.emplace(op.input_id(i), op.input(i), workspace);
    }
  }
  explicit operator bool() const { return input_.has_value(); }
  // Null if it is left out.
  [[nodiscard]] const float* load(const RunContext& context,
                                  char* workspace) const {
    return input_ ? input_->load(context, workspace) : nullptr;
  }

 private:
  std::optional<FloatInput> input_;
};

class MaybeOutput {
 public:
  MaybeOutput(const OpView& op, size_t i, Workspace& workspace) {
    if (op.has_output(i)) {
      output_.emplace(op.output_id(i), op.output(i), workspace);
    }
  }
  explicit operator bool() const { return output_.has_value(); }
  // Allocates only if there is an output.
  [[nodiscard]] float* buffer(const RunContext& context,
                              char* workspace) const {
    return output_->buffer(context, workspace);
  }
  void store(const RunContext& context, const char* workspace) const {
    if (output_) output_->store(context, workspace);
  }
  // Lets fill(memory) compute the output, if there is one.
  template <typename Fill>
  void write(const RunContext& context, char* workspace, Fill&& fill) const {
    if (!output_) return;
    fill(output_->buffer(context, workspace));
    output_->store(context, workspace);
  }

 private:
  std::optional<FloatOutput> output_;
};

// The sums of all columns of a contiguous matrix; the rows are added in order.
void column_sums(const float* matrix, int64_t rows, int64_t columns,
                 float* out);

// A matrix product that csrc/dense computes, or ATen if csrc/dense cannot.
class Product {
 public:
  Product(const dense::MatmulSpec& spec, Workspace& workspace);
  void run(const float* a, const float* b, const float* bias, float* c,
           char* workspace) const;

 private:
  dense::MatmulSpec spec_;
  std::unique_ptr<dense::Matmul> matmul_;
  size_t offset_ = 0;
};

}  // namespace popsim::ops::recurrent
