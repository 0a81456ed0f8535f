// The backward of one recurrent layer in one direction.
//
// Each step computes the gradient of its gates from the gradient of h: the part
// that comes from outside, and the part that comes through the weight from the
// step after it. After the last step, the gradients of all weights, biases and
// inputs are computed at once. With half partials, the gradients of the gates
// are rounded to float16 before they are operands of a product.
#include <algorithm>
#include <optional>

#include "ops/op_def.h"
#include "ops/recurrent/layer.h"
#include "ops/recurrent/step_product.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using recurrent::column_sums;
using recurrent::Dims;
using recurrent::MaybeInput;
using recurrent::MaybeOutput;
using recurrent::Part;
using recurrent::Scratch;

enum Input : size_t {
  kGradY,
  kGradH,
  kGradC,
  kX,
  kH0,
  kC0,
  kWeightInput,
  kWeightHidden,
  kY,
  kGates,
  kState
};
enum Output : size_t {
  kGradX,
  kGradH0,
  kGradC0,
  kGradWeightInput,
  kGradWeightHidden,
  kGradBiasInput,
  kGradBiasHidden
};

constexpr recurrent::Operands kOperands{kX, kWeightInput, kWeightHidden};

// The gradient of y is read in place if the numbers of a row are adjacent,
// whatever the distance between rows.
FloatInput grad_y_of(const OpView& op, Workspace& workspace) {
  const graph::Tensor& y = op.input(kGradY);
  const bool keep = y.strides[2] == 1 || y.shape[2] == 1;
  return {{op.input_id(kGradY), y.dtype, y.shape, y.strides},
          {0, 1, 2},
          keep,
          workspace};
}

template <typename Cell>
class RecurrentGradKernel final : public Kernel {
 public:
  explicit RecurrentGradKernel(const OpView& op);
  void run(const RunContext& context) override;

 private:
  // The memory that the steps read and write.
  struct Memory {
    // These pointers are null if the input or output is missing.
    const float* grad_y;
    const float* grad_h;
    const float* h0;
    const float* c0;
    const float* y;
    const float* gates;
    const float* state;
    const float* weight_hidden;
    float* grad_input_gates;
    float* grad_hidden_gates;
    float* carry;
    float* last;  // the gradient of the last h, later that of h0
  };
  [[nodiscard]] Memory load(const RunContext& context, char* workspace) const;
  [[nodiscard]] recurrent::BackwardStep step_memory(const Memory& memory,
                                                    int64_t index) const;
  void run_steps(const Memory& memory, char* workspace) const;
  void run_step(const Memory& memory, char* workspace, int64_t index,
                const Part& part) const;
  void round_gates(const recurrent::BackwardStep& step, int64_t gate_at,
                   int64_t count) const;
  void write_grad_h0(const Memory& memory, char* workspace,
                     const Part& part) const;
  const float* load_h_before(const Memory& memory, char* workspace) const;
  void write_weights(const RunContext& context, const Memory& memory,
                     char* workspace) const;

  Workspace workspace_;
  Dims dims_;
  std::optional<FloatInput> grad_y_;
  MaybeInput grad_h_;
  MaybeInput grad_c_;
  FloatInput x_;
  FloatInput h0_;
  MaybeInput c0_;
  FloatInput weight_input_;
  FloatInput weight_hidden_;
  FloatInput y_;
  MaybeInput gates_;
  MaybeInput state_;
  MaybeOutput grad_x_;
  MaybeOutput grad_h0_;
  MaybeOutput grad_c0_;
  MaybeOutput grad_weight_input_;
  MaybeOutput grad_weight_hidden_;
  MaybeOutput grad_bias_input_;
  MaybeOutput grad_bias_hidden_;
  recurrent::StepProduct steps_;
  Scratch input_gates_;
  Scratch hidden_gates_;
  Scratch carry_;
  Scratch last_;
  Scratch h_before_;
  recurrent::Product for_x_;
  recurrent::Product for_weight_input_;
  recurrent::Product for_weight_hidden_;
};

dense::MatmulSpec weight_product(const Dims& dims, int64_t columns) {
  return {.m = dims.gate_columns(),
          .n = columns,
          .k = dims.rows(),
          .a = {.row = 1, .column = dims.gate_columns()},
          .b = {.row = columns, .column = 1},
          .significant_bits = dims.significant_bits,
          .half_partials = dims.half_partials};
}

template <typename Cell>
RecurrentGradKernel<Cell>::RecurrentGradKernel(const OpView& op)
    : dims_(recurrent::dims_of(op, kOperands)),
      grad_h_(op, kGradH, workspace_),
      grad_c_(op, kGradC, workspace_),
      x_(op.input_id(kX), op.input(kX), workspace_),
      h0_(op.input_id(kH0), op.input(kH0), workspace_),
      c0_(op, kC0, workspace_),
      weight_input_(op.input_id(kWeightInput), op.input(kWeightInput),
                    workspace_),
      weight_hidden_(op.input_id(kWeightHidden), op.input(kWeightHidden),
                     workspace_),
      y_(op.input_id(kY), op.input(kY), workspace_),
      gates_(op, kGates, workspace_),
      state_(op, kState, workspace_),
      grad_x_(op, kGradX, workspace_),
      grad_h0_(op, kGradH0, workspace_),
      grad_c0_(op, kGradC0, workspace_),
      grad_weight_input_(op, kGradWeightInput, workspace_),
      grad_weight_hidden_(op, kGradWeightHidden, workspace_),
      grad_bias_input_(op, kGradBiasInput, workspace_),
      grad_bias_hidden_(op, kGradBiasHidden, workspace_),
      steps_(dims_,
             {.gates = 1, .depth = dims_.gate_columns(), .transposed = true},
             workspace_),
      input_gates_(Cell::kTwoGradients ? dims_.gate_floats() : 0, workspace_),
      hidden_gates_(dims_.gate_floats(), workspace_),
      carry_(dims_.state_floats(), workspace_),
      last_(dims_.state_floats(), workspace_),
      h_before_(dims_.rows() * dims_.hidden, workspace_),
      for_x_({.m = dims_.rows(),
              .n = dims_.inputs,
              .k = dims_.gate_columns(),
              .a = {.row = dims_.gate_columns(), .column = 1},
              .b = {.row = dims_.inputs, .column = 1},
              .significant_bits = dims_.significant_bits,
              .half_partials = dims_.half_partials},
             workspace_),
      for_weight_input_(weight_product(dims_, dims_.inputs), workspace_),
      for_weight_hidden_(weight_product(dims_, dims_.hidden), workspace_) {
  if (op.has_input(kGradY)) grad_y_.emplace(grad_y_of(op, workspace_));
}

template <typename Cell>
auto RecurrentGradKernel<Cell>::load(const RunContext& context,
                                     char* workspace) const -> Memory {
  Memory memory{.grad_y = grad_y_ ? grad_y_->load(context, workspace) : nullptr,
                .grad_h = grad_h_.load(context, workspace),
                .h0 = h0_.load(context, workspace),
                .c0 = c0_.load(context, workspace),
                .y = y_.load(context, workspace),
                .gates = gates_.load(context, workspace),
                .state = state_.load(context, workspace),
                .weight_hidden = weight_hidden_.load(context, workspace),
                .grad_input_gates = nullptr,
                .grad_hidden_gates = hidden_gates_.in(workspace),
                .carry = carry_.in(workspace),
                .last = last_.in(workspace)};
  memory.grad_input_gates = Cell::kTwoGradients ? input_gates_.in(workspace)
                                                : memory.grad_hidden_gates;
  const auto copy_or_zero = [&](const float* from, float* to) {
    if (from != nullptr) {
      std::copy_n(from, dims_.state_floats(), to);
    } else {
      std::fill_n(to, dims_.state_floats(), 0.0f);
    }
  };
  copy_or_zero(grad_c_.load(context, workspace), memory.carry);
  copy_or_zero(memory.grad_h, memory.last);
  return memory;
}

// `index` counts the steps from the one that forward ran last.
template <typename Cell>
recurrent::BackwardStep RecurrentGradKernel<Cell>::step_memory(
    const Memory& memory, int64_t index) const {
  const int64_t size = dims_.state_floats();
  const int64_t forward_index = dims_.steps - 1 - index;
  const int64_t now = dims_.step(forward_index);
  const bool first = forward_index == 0;
  const int64_t before = first ? 0 : dims_.step_before(forward_index);
  recurrent::BackwardStep step;
  step.hidden = dims_.hidden;
  step.h = memory.y + now * size;
  step.h_before = first ? memory.h0 : memory.y + before * size;
  if (memory.gates != nullptr) {
    step.gates = memory.gates + now * size * dims_.gates;
  }
  if (memory.state != nullptr) {
    step.state = memory.state + now * size;
    step.state_before = first ? memory.c0 : memory.state + before * size;
  }
  if (memory.grad_y != nullptr) {
    step.grad_h = memory.grad_y + now * grad_y_->strides()[0];
    step.grad_h_stride = grad_y_->strides()[1];
  }
  step.grad_input_gates = memory.grad_input_gates + now * size * dims_.gates;
  step.grad_hidden_gates = memory.grad_hidden_gates + now * size * dims_.gates;
  step.carry = memory.carry;
  return step;
}

template <typename Cell>
void RecurrentGradKernel<Cell>::run_step(const Memory& memory, char* workspace,
                                         int64_t index,
                                         const Part& part) const {
  const int64_t hidden = dims_.hidden;
  const recurrent::BackwardStep step = step_memory(memory, index);
  const auto visit = [&](int64_t row, int64_t unit, int64_t count,
                         const float* product) {
    const int64_t gate_at = row * Cell::kGates * hidden + unit;
    Cell::backward(step, {row, row * hidden + unit, gate_at, count}, product);
    if (dims_.half_partials) round_gates(step, gate_at, count);
  };
  if (index == 0) {
    steps_.for_each(part, [&](int64_t row, int64_t unit, int64_t count) {
      visit(row, unit, count, memory.last + row * hidden + unit);
    });
    return;
  }
  const float* grads = step_memory(memory, index - 1).grad_hidden_gates;
  steps_.multiply(
      memory.weight_hidden, workspace, grads, part,
      [&](int64_t row, int64_t unit, int64_t count, const float* product,
          int64_t /*stride*/) { visit(row, unit, count, product); });
}

template <typename Cell>
void RecurrentGradKernel<Cell>::round_gates(const recurrent::BackwardStep& step,
                                            int64_t gate_at,
                                            int64_t count) const {
  for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
    const int64_t at = gate_at + gate * dims_.hidden;
    recurrent::round_to_half(step.grad_hidden_gates + at, count);
    if (Cell::kTwoGradients) {
      recurrent::round_to_half(step.grad_input_gates + at, count);
    }
  }
}

template <typename Cell>
void RecurrentGradKernel<Cell>::write_grad_h0(const Memory& memory,
                                              char* workspace,
                                              const Part& part) const {
  const float* grads = step_memory(memory, dims_.steps - 1).grad_hidden_gates;
  steps_.multiply(memory.weight_hidden, workspace, grads, part,
                  [&](int64_t row, int64_t unit, int64_t count,
                      const float* product, int64_t /*stride*/) {
                    const int64_t at = row * dims_.hidden + unit;
                    recurrent::Vec sum = recurrent::load(product, count);
                    if (Cell::kTwoGradients) {
                      sum = sum + recurrent::load(memory.carry + at, count);
                    }
                    recurrent::store(sum, memory.last + at, count);
                  });
}

template <typename Cell>
void RecurrentGradKernel<Cell>::run_steps(const Memory& memory,
                                          char* workspace) const {
  const int64_t steps = dims_.steps + (grad_h0_ ? 1 : 0);
  steps_.run(memory.weight_hidden, workspace, steps,
             [&](int64_t index, const Part& part) {
               if (index < dims_.steps) {
                 run_step(memory, workspace, index, part);
               } else {
                 write_grad_h0(memory, workspace, part);
               }
             });
}

// The h at the beginning of each step, in the order of the gates' gradients.
template <typename Cell>
const float* RecurrentGradKernel<Cell>::load_h_before(const Memory& memory,
                                                      char* workspace) const {
  const int64_t size = dims_.state_floats();
  const int64_t rest = (dims_.steps - 1) * size;
  float* out = h_before_.in(workspace);
  std::copy_n(memory.y + (dims_.reverse ? size : 0), rest,
              out + (dims_.reverse ? 0 : size));
  std::copy_n(memory.h0, size, out + (dims_.reverse ? rest : 0));
  return out;
}

template <typename Cell>
void RecurrentGradKernel<Cell>::write_weights(const RunContext& context,
                                              const Memory& memory,
                                              char* workspace) const {
  const float* input_gates = memory.grad_input_gates;
  const float* hidden_gates = memory.grad_hidden_gates;
  grad_weight_input_.write(context, workspace, [&](float* out) {
    for_weight_input_.run(input_gates, x_.load(context, workspace), nullptr,
                          out, workspace);
  });
  grad_weight_hidden_.write(context, workspace, [&](float* out) {
    for_weight_hidden_.run(hidden_gates, load_h_before(memory, workspace),
                           nullptr, out, workspace);
  });
  const int64_t rows = dims_.rows();
  const int64_t columns = dims_.gate_columns();
  grad_bias_input_.write(context, workspace, [&](float* out) {
    column_sums(input_gates, rows, columns, out);
  });
  grad_bias_hidden_.write(context, workspace, [&](float* out) {
    column_sums(hidden_gates, rows, columns, out);
  });
}

template <typename Cell>
void RecurrentGradKernel<Cell>::run(const RunContext& context) {
  char* workspace = workspace_.memory();
  const Memory memory = load(context, workspace);
  run_steps(memory, workspace);
  grad_h0_.write(context, workspace, [&](float* out) {
    std::copy_n(memory.last, dims_.state_floats(), out);
  });
  grad_c0_.write(context, workspace, [&](float* out) {
    std::copy_n(memory.carry, dims_.state_floats(), out);
  });
  grad_x_.write(context, workspace, [&](float* out) {
    for_x_.run(memory.grad_input_gates, weight_input_.load(context, workspace),
               nullptr, out, workspace);
  });
  write_weights(context, memory, workspace);
}

void check_inputs(const OpCall& op, const Dims& dims) {
  const recurrent::Kept kept = recurrent::kept_by(op);
  const Shape state{dims.batch, dims.hidden};
  const Shape states{dims.steps, dims.batch, dims.hidden};
  const Shape gates{dims.steps, dims.batch, dims.gate_columns()};
  const auto check = [&](size_t input, bool wanted, const Shape& shape) {
    recurrent::check_input(op, input, wanted, shape);
  };
  check(kGradY, op.has_input(kGradY), states);
  check(kGradH, op.has_input(kGradH), state);
  check(kGradC, kept.cell_state && op.has_input(kGradC), state);
  check(kH0, true, state);
  check(kC0, kept.cell_state, state);
  check(kY, true, states);
  check(kGates, kept.gates, gates);
  check(kState, kept.state, states);
}

std::vector<TensorType> types(const OpCall& op) {
  const Dims dims = recurrent::dims_of(op, kOperands);
  check_inputs(op, dims);
  const Shape state{dims.batch, dims.hidden};
  const Shape bias{dims.gate_columns()};
  std::vector<TensorType> types;
  for (const Shape& shape :
       {op.input(kX).shape, state, state, op.input(kWeightInput).shape,
        op.input(kWeightHidden).shape, bias, bias}) {
    types.push_back({dims.dtype, shape});
  }
  return types;
}

std::unique_ptr<Kernel> prepare(const OpView& op) {
  return recurrent::with_cell(op, [&](auto cell) -> std::unique_ptr<Kernel> {
    return std::make_unique<RecurrentGradKernel<decltype(cell)>>(op);
  });
}

// For each product of the layer there are two: one for the gradient of its
// input, and one for that of its weight.
std::vector<graph::Work> work(const OpView& op) {
  const Dims dims = recurrent::dims_of(op, kOperands);
  std::vector<graph::Work> work = recurrent::layer_work(dims);
  const auto add = [&](size_t output, int64_t width) {
    if (!op.has_output(output)) return;
    work.emplace_back(
        graph::Product{1, dims.gate_columns(), width, dims.rows(), dims.dtype});
  };
  if (!op.has_output(kGradX)) work.erase(work.begin());
  add(kGradWeightInput, dims.inputs);
  add(kGradWeightHidden, dims.hidden);
  return work;
}

}  // namespace

extern const OpDef kRecurrentGrad{
    .name = "recurrent_grad",
    .schema =
        "recurrent_grad(Tensor{floats}? grad_y, Tensor{floats}? grad_h, "
        "Tensor{floats}? grad_c, Tensor{floats} x, Tensor{floats} h0, "
        "Tensor{floats}? c0, Tensor{floats} weight_input, "
        "Tensor{floats} weight_hidden, Tensor{floats} y, "
        "Tensor{floats}? gates, Tensor{floats}? state, *, "
        "str{lstm, gru, rnn_relu, rnn_tanh} mode, bool reverse, "
        "str{half}? partials, str{bf16, tf32}? precision) -> (Tensor? grad_x, "
        "Tensor? grad_h0, "
        "Tensor? grad_c0, Tensor? grad_weight_input, "
        "Tensor? grad_weight_hidden, Tensor? grad_bias_input, "
        "Tensor? grad_bias_hidden)",
    .family = "recurrent",
    .shape = types,
    .prepare = prepare,
    .work = work,
    .layer = true,
};

}  // namespace popsim::ops
