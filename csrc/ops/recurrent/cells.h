// The operations of one step of each recurrent layer on the product of the
// previous state and the weights, and their backward.
#pragma once

#include "dense/vector/half.h"
#include "dense/vector/panels.h"
#include "ops/recurrent/math.h"

namespace popsim::ops::recurrent {

// The memory of a step: each pointer is the first row of shape (batch, hidden),
// gates of shape (batch, gates * hidden).
struct ForwardStep {
  int64_t hidden = 0;
  // Contains the part that comes from the input; the step replaces it with the
  // gates' values.
  float* gates = nullptr;
  const float* h_before = nullptr;
  float* h = nullptr;
  // LSTM: the cell state. GRU: the values that the reset gate is multiplied
  // with.
  const float* state_before = nullptr;
  float* state = nullptr;           // GRU: null if no op reads it
  const float* bias_new = nullptr;  // GRU: added to the state
};

struct BackwardStep {
  int64_t hidden = 0;
  const float* gates = nullptr;
  const float* h_before = nullptr;
  const float* h = nullptr;
  const float* state_before = nullptr;
  const float* state = nullptr;
  const float* grad_h = nullptr;  // from outside; null: none
  int64_t grad_h_stride = 0;      // stride between rows
  // The gradients of the contributions of the input and of the previous h to
  // the gates; the same memory, except for GRU.
  float* grad_input_gates = nullptr;
  float* grad_hidden_gates = nullptr;
  // Passes from a step to the step before it: for LSTM the gradient of the cell
  // state, for GRU the part of the gradient of h that does not go through the
  // gates.
  float* carry = nullptr;
};

[[nodiscard]] inline Vec load(const float* from, int64_t count) {
  return count == kLanes ? Vec::loadu(from) : Vec::loadu(from, count);
}

inline void store(Vec value, float* to, int64_t count) {
  if (count == kLanes) {
    value.store(to);
  } else {
    value.store(to, static_cast<int>(count));
  }
}

// Numbers that are operands of a product with half partials must be float16.
inline void round_to_half(float* values, int64_t count) {
  store(dense::rounded_to_half(load(values, count)), values, count);
}

// `at`: the offset of the units in rows of length hidden; `gate_at`: that of
// their first gate.
struct Place {
  int64_t row;
  int64_t at;
  int64_t gate_at;
  int64_t count;
};

[[nodiscard]] inline Vec incoming_gradient(const BackwardStep& step,
                                           const Place& place,
                                           const float* product) {
  const Vec later = load(product, place.count);
  if (step.grad_h == nullptr) return later;
  const int64_t unit = place.at - place.row * step.hidden;
  return later +
         load(step.grad_h + place.row * step.grad_h_stride + unit, place.count);
}

// A cell computes a step in two phases, each for all rows of a panel: the
// gates, whose values are independent of each other, and the state. So the
// processor need not wait for one after the other.
struct Lstm {
  static constexpr int64_t kGates = 4;
  static constexpr bool kHasState = true;
  static constexpr bool kTwoGradients = false;
  static constexpr bool kCarries = true;

  static void forward_gates(const ForwardStep& step, const Place& place,
                            const float* product, int64_t stride) {
    const auto [row, at, gate_at, n] = place;
    float* gates = step.gates + gate_at;
    const auto gate = [&](int64_t index) {
      return load(gates + index * step.hidden, n) +
             load(product + index * stride, n);
    };
    const Vec input = sigmoid(gate(0));
    const Vec forget = sigmoid(gate(1));
    const Vec candidate = tanh(gate(2));
    const Vec output = sigmoid(gate(3));
    store(input, gates, n);
    store(forget, gates + step.hidden, n);
    store(candidate, gates + 2 * step.hidden, n);
    store(output, gates + 3 * step.hidden, n);
  }

  static void forward_state(const ForwardStep& step, const Place& place,
                            const float* /*product*/, int64_t /*stride*/) {
    const auto [row, at, gate_at, n] = place;
    const float* gates = step.gates + gate_at;
    const Vec input = load(gates, n);
    const Vec forget = load(gates + step.hidden, n);
    const Vec candidate = load(gates + 2 * step.hidden, n);
    const Vec output = load(gates + 3 * step.hidden, n);
    const Vec state =
        forget * load(step.state_before + at, n) + input * candidate;
    store(state, step.state + at, n);
    store(output * tanh(state), step.h + at, n);
  }

  static void backward(const BackwardStep& step, const Place& place,
                       const float* product) {
    const auto [row, at, gate_at, n] = place;
    const int64_t hidden = step.hidden;
    const Vec one(1.0f);
    const float* gates = step.gates + gate_at;
    const Vec input = load(gates, n);
    const Vec forget = load(gates + hidden, n);
    const Vec candidate = load(gates + 2 * hidden, n);
    const Vec output = load(gates + 3 * hidden, n);
    const Vec squashed = tanh(load(step.state + at, n));
    const Vec grad_h = incoming_gradient(step, place, product);
    const Vec grad_state = load(step.carry + at, n) +
                           grad_h * output * (one - squashed * squashed);
    float* grads = step.grad_hidden_gates + gate_at;
    store(grad_state * candidate * input * (one - input), grads, n);
    store(
        grad_state * load(step.state_before + at, n) * forget * (one - forget),
        grads + hidden, n);
    store(grad_state * input * (one - candidate * candidate),
          grads + 2 * hidden, n);
    store(grad_h * squashed * output * (one - output), grads + 3 * hidden, n);
    store(grad_state * forget, step.carry + at, n);
  }
};

struct Gru {
  static constexpr int64_t kGates = 3;
  static constexpr bool kHasState = true;
  static constexpr bool kTwoGradients = true;
  static constexpr bool kCarries = true;

  static void forward_gates(const ForwardStep& step, const Place& place,
                            const float* product, int64_t stride) {
    const auto [row, at, gate_at, n] = place;
    float* gates = step.gates + gate_at;
    const auto gate = [&](int64_t index) {
      return load(gates + index * step.hidden, n) +
             load(product + index * stride, n);
    };
    const Vec reset = sigmoid(gate(0));
    const Vec update = sigmoid(gate(1));
    store(reset, gates, n);
    store(update, gates + step.hidden, n);
  }

  static void forward_state(const ForwardStep& step, const Place& place,
                            const float* product, int64_t stride) {
    const auto [row, at, gate_at, n] = place;
    float* gates = step.gates + gate_at;
    const Vec reset = load(gates, n);
    const Vec update = load(gates + step.hidden, n);
    Vec state = load(product + 2 * stride, n);
    if (step.bias_new != nullptr) {
      state = state + load(step.bias_new + at - row * step.hidden, n);
    }
    const Vec candidate =
        tanh(load(gates + 2 * step.hidden, n) + reset * state);
    store(candidate, gates + 2 * step.hidden, n);
    if (step.state != nullptr) store(state, step.state + at, n);
    store(candidate + update * (load(step.h_before + at, n) - candidate),
          step.h + at, n);
  }

  static void backward(const BackwardStep& step, const Place& place,
                       const float* product) {
    const auto [row, at, gate_at, n] = place;
    const int64_t hidden = step.hidden;
    const Vec one(1.0f);
    const float* gates = step.gates + gate_at;
    const Vec reset = load(gates, n);
    const Vec update = load(gates + hidden, n);
    const Vec candidate = load(gates + 2 * hidden, n);
    const Vec grad_h =
        incoming_gradient(step, place, product) + load(step.carry + at, n);
    const Vec grad_candidate =
        grad_h * (one - update) * (one - candidate * candidate);
    const Vec grad_reset =
        grad_candidate * load(step.state + at, n) * reset * (one - reset);
    const Vec grad_update = grad_h * (load(step.h_before + at, n) - candidate) *
                            update * (one - update);
    for (float* grads :
         {step.grad_input_gates + gate_at, step.grad_hidden_gates + gate_at}) {
      store(grad_reset, grads, n);
      store(grad_update, grads + hidden, n);
    }
    store(grad_candidate, step.grad_input_gates + gate_at + 2 * hidden, n);
    store(grad_candidate * reset, step.grad_hidden_gates + gate_at + 2 * hidden,
          n);
    store(grad_h * update, step.carry + at, n);
  }
};

// The gates of a plain layer are its h: they share the same memory.
template <bool kRelu>
struct Plain {
  static constexpr int64_t kGates = 1;
  static constexpr bool kHasState = false;
  static constexpr bool kTwoGradients = false;
  static constexpr bool kCarries = false;

  static void forward_gates(const ForwardStep& /*step*/, const Place& /*place*/,
                            const float* /*product*/, int64_t /*stride*/) {}

  static void forward_state(const ForwardStep& step, const Place& place,
                            const float* product, int64_t /*stride*/) {
    const Vec sum =
        load(step.h + place.at, place.count) + load(product, place.count);
    // clamp_min keeps a NaN.
    store(kRelu ? at::vec::clamp_min(sum, Vec(0.0f)) : tanh(sum),
          step.h + place.at, place.count);
  }

  static void backward(const BackwardStep& step, const Place& place,
                       const float* product) {
    const Vec grad_h = incoming_gradient(step, place, product);
    const Vec h = load(step.h + place.at, place.count);
    const Vec grad = kRelu ? Vec::blendv(Vec(0.0f), grad_h, h > Vec(0.0f))
                           : grad_h * (Vec(1.0f) - h * h);
    store(grad, step.grad_hidden_gates + place.at, place.count);
  }
};

using RnnTanh = Plain<false>;
using RnnRelu = Plain<true>;

}  // namespace popsim::ops::recurrent
