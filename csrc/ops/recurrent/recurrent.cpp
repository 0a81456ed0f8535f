// One layer of an LSTM, a GRU or a plain recurrent network, in one direction,
// over a whole sequence.
//
// The inputs of all steps are multiplied with their weight at once. Then each
// step adds the product of the previous h and its weight and computes the gates
// while the sums are still in the cache. With half partials, the h of each step
// is rounded to float16 before the product of the next step uses it.

#include "ops/op_def.h"
#include "ops/recurrent/layer.h"
#include "ops/recurrent/step_product.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

using recurrent::Dims;
using recurrent::MaybeInput;
using recurrent::MaybeOutput;
using recurrent::Scratch;

enum Input : size_t {
  kX,
  kH0,
  kC0,
  kWeightInput,
  kWeightHidden,
  kBiasInput,
  kBiasHidden
};
enum Output : size_t { kY, kGates, kState };

constexpr recurrent::Operands kOperands{kX, kWeightInput, kWeightHidden};

template <typename Cell>
class RecurrentKernel final : public Kernel {
 public:
  explicit RecurrentKernel(const OpView& op)
      : dims_(recurrent::dims_of(op, kOperands)),
        x_(op.input_id(kX), op.input(kX), workspace_),
        h0_(op.input_id(kH0), op.input(kH0), workspace_),
        c0_(op, kC0, workspace_),
        weight_input_(op.input_id(kWeightInput), op.input(kWeightInput),
                      workspace_),
        weight_hidden_(op.input_id(kWeightHidden), op.input(kWeightHidden),
                       workspace_),
        bias_input_(op, kBiasInput, workspace_),
        bias_hidden_(op, kBiasHidden, workspace_),
        y_(op.output_id(kY), op.output(kY), workspace_),
        gates_(op, kGates, workspace_),
        state_(op, kState, workspace_),
        steps_(
            dims_,
            {.gates = dims_.gates, .depth = dims_.hidden, .transposed = false},
            workspace_),
        bias_(dims_.gate_columns(), workspace_),
        own_gates_(gates_ || Cell::kGates == 1 ? 0 : dims_.gate_floats(),
                   workspace_),
        own_state_(state_ || !Cell::kHasState ? 0 : dims_.state_floats(),
                   workspace_),
        product_({.m = dims_.rows(),
                  .n = dims_.gate_columns(),
                  .k = dims_.inputs,
                  .a = {.row = dims_.inputs, .column = 1},
                  .b = {.row = 1, .column = dims_.inputs},
                  .bias = static_cast<bool>(bias_input_),
                  .significant_bits = dims_.significant_bits,
                  .half_partials = dims_.half_partials},
                 workspace_) {}

  void run(const RunContext& context) override;

 private:
  void load_bias(const RunContext& context, char* workspace);
  // The pointers that are the same for all steps.
  struct Memory {
    float* y;
    float* gates;
    float* state;
    const float* h0;
    const float* c0;
    const float* bias_new;
  };
  [[nodiscard]] recurrent::ForwardStep step_memory(const Memory& memory,
                                                   int64_t index) const;

  Workspace workspace_;
  Dims dims_;
  FloatInput x_;
  FloatInput h0_;
  MaybeInput c0_;
  FloatInput weight_input_;
  FloatInput weight_hidden_;
  MaybeInput bias_input_;
  MaybeInput bias_hidden_;
  FloatOutput y_;
  MaybeOutput gates_;
  MaybeOutput state_;
  recurrent::StepProduct steps_;
  Scratch bias_;
  // Memory that replaces a missing output of the op.
  Scratch own_gates_;
  Scratch own_state_;
  recurrent::Product product_;
};

// The biases are added together, except GRU's part that the reset gate is
// multiplied with.
template <typename Cell>
void RecurrentKernel<Cell>::load_bias(const RunContext& context,
                                      char* workspace) {
  const float* input = bias_input_.load(context, workspace);
  const float* hidden = bias_hidden_.load(context, workspace);
  const int64_t both =
      Cell::kTwoGradients ? 2 * dims_.hidden : dims_.gate_columns();
  float* out = bias_.in(workspace);
  for (int64_t i = 0; i < dims_.gate_columns(); ++i) {
    out[i] = i < both ? input[i] + hidden[i] : input[i];
  }
}

template <typename Cell>
recurrent::ForwardStep RecurrentKernel<Cell>::step_memory(const Memory& memory,
                                                          int64_t index) const {
  const int64_t size = dims_.state_floats();
  const int64_t now = dims_.step(index);
  const int64_t before = index == 0 ? 0 : dims_.step_before(index);
  // If no op reads the states later, each step overwrites the state of the step
  // before.
  const int64_t state_size = state_ ? size : 0;
  const bool first = index == 0;
  recurrent::ForwardStep step;
  step.hidden = dims_.hidden;
  step.h = memory.y + now * size;
  step.h_before = first ? memory.h0 : memory.y + before * size;
  step.bias_new = memory.bias_new;
  if constexpr (Cell::kGates > 1) {
    step.gates = memory.gates + now * size * dims_.gates;
  }
  if (memory.state != nullptr) {
    step.state = memory.state + now * state_size;
    step.state_before = first ? memory.c0 : memory.state + before * state_size;
  }
  return step;
}

template <typename Cell>
void RecurrentKernel<Cell>::run(const RunContext& context) {
  char* workspace = workspace_.memory();
  Memory memory{.y = y_.buffer(context, workspace),
                .gates = own_gates_.in(workspace),
                .state = nullptr,
                .h0 = h0_.load(context, workspace),
                .c0 = nullptr,
                .bias_new = nullptr};
  if (Cell::kGates == 1) memory.gates = memory.y;
  if (gates_) memory.gates = gates_.buffer(context, workspace);
  if (state_) memory.state = state_.buffer(context, workspace);
  if (c0_) {
    memory.c0 = c0_.load(context, workspace);
    if (!state_) memory.state = own_state_.in(workspace);
  }
  if (bias_input_) load_bias(context, workspace);
  if (Cell::kTwoGradients && bias_hidden_) {
    memory.bias_new = bias_hidden_.load(context, workspace) + 2 * dims_.hidden;
  }
  product_.run(
      x_.load(context, workspace), weight_input_.load(context, workspace),
      bias_input_ ? bias_.in(workspace) : nullptr, memory.gates, workspace);
  const int64_t hidden = dims_.hidden;
  const float* weights = weight_hidden_.load(context, workspace);
  const auto run_step = [&](int64_t index, const recurrent::Part& part) {
    const recurrent::ForwardStep step = step_memory(memory, index);
    const auto place = [&](int64_t row, int64_t unit,
                           int64_t count) -> recurrent::Place {
      return {row, row * hidden + unit, row * Cell::kGates * hidden + unit,
              count};
    };
    steps_.multiply(
        weights, workspace, step.h_before, part,
        [&](int64_t row, int64_t unit, int64_t count, const float* product,
            int64_t stride) {
          Cell::forward_gates(step, place(row, unit, count), product, stride);
        },
        [&](int64_t row, int64_t unit, int64_t count, const float* product,
            int64_t stride) {
          Cell::forward_state(step, place(row, unit, count), product, stride);
          if (dims_.half_partials) {
            recurrent::round_to_half(step.h + row * hidden + unit, count);
          }
        });
  };
  steps_.run(weights, workspace, dims_.steps, run_step);
  y_.store(context, workspace);
  gates_.store(context, workspace);
  state_.store(context, workspace);
}

std::vector<TensorType> types(const OpCall& op) {
  const Dims dims = recurrent::dims_of(op, kOperands);
  const recurrent::Kept kept = recurrent::kept_by(op);
  recurrent::check_input(op, kH0, true, {dims.batch, dims.hidden});
  recurrent::check_input(op, kC0, kept.cell_state, {dims.batch, dims.hidden});
  for (const size_t bias : {kBiasInput, kBiasHidden}) {
    recurrent::check_input(op, bias, op.has_input(kBiasInput),
                           {dims.gate_columns()});
  }
  const TensorType state{dims.dtype, {dims.steps, dims.batch, dims.hidden}};
  const TensorType gates{dims.dtype,
                         {dims.steps, dims.batch, dims.gate_columns()}};
  return {state, kept.gates ? gates : TensorType::none(),
          kept.state ? state : TensorType::none()};
}

std::unique_ptr<Kernel> prepare(const OpView& op) {
  return recurrent::with_cell(op, [&](auto cell) -> std::unique_ptr<Kernel> {
    return std::make_unique<RecurrentKernel<decltype(cell)>>(op);
  });
}

std::vector<graph::Work> work(const OpView& op) {
  return recurrent::layer_work(recurrent::dims_of(op, kOperands));
}

}  // namespace

extern const OpDef kRecurrent{
    .name = "recurrent",
    .schema =
        "recurrent(Tensor{floats} x, Tensor{floats} h0, Tensor{floats}? c0, "
        "Tensor{floats} weight_input, Tensor{floats} weight_hidden, "
        "Tensor{floats}? bias_input, Tensor{floats}? bias_hidden, *, "
        "str{lstm, gru, rnn_relu, rnn_tanh} mode, bool reverse, "
        "str{half}? partials, str{bf16, tf32}? precision) -> (Tensor y, "
        "Tensor? gates, Tensor? state)",
    .family = "recurrent",
    .shape = types,
    .prepare = prepare,
    .work = work,
    .layer = true,
};

}  // namespace popsim::ops
