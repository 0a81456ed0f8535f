// Mish, x * tanh(softplus(x)), as one operator with its gradient.
//
// Written with tanh and softplus, Mish calls four functions. With n = exp(x) it
// is x * n (n + 2) / (n (n + 2) + 2), which needs a single exponential.
#include <popsim_custom_op.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

using popsim::Call;
using popsim::Half;
using popsim::Tensor;

namespace {

// Compilers can vectorize a loop that calls this function, but not a loop that
// calls std::exp. From x = 20 on, Mish equals x in all digits of a float.
inline float exponential(float x) {
  x = x < -87.0F ? -87.0F : x > 20.0F ? 20.0F : x;
  constexpr float kRound =
      12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float power = (x * 1.44269504F + kRound) - kRound;
  const float rest = (x - power * 0.693359375F) + power * 2.12194440e-4F;
  float value = 1.9875691500e-4F;
  for (const float next : {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F,
                           1.6666665459e-1F, 5.0000001201e-1F}) {
    value = value * rest + next;
  }
  value = value * rest * rest + rest + 1.0F;
  const int32_t bits = (static_cast<int32_t>(power) + 127) * (1 << 23);
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return value * scale;
}

inline float mish(float x) {
  const float n = exponential(x);
  const float product = n * (n + 2.0F);
  return x * (product / (product + 2.0F));
}

inline float slope(float x) {
  const float n = exponential(x);
  const float product = n * (n + 2.0F);
  const float quotient = 1.0F / (product + 2.0F);
  return product * quotient +
         x * (4.0F * n * (n + 1.0F)) * (quotient * quotient);
}

// Declares the output and checks the input. The tensors have no values yet.
void shapes(const Call& call) {
  call.require(call.num_inputs() == 1, "Mish takes one input");
  const int32_t dtype = call.input(0).dtype();
  call.require(dtype == POPSIM_FLOAT32 || dtype == POPSIM_FLOAT16,
               "Mish takes float32 or float16");
  call.declare_like(call.input(0));
}

template <typename T>
void compute(const Call& call) {
  const T* x = call.input_data<T>(0);
  T* y = call.output_data<T>(0);
  // A unit is one value of the tensor. It reads one number and writes one.
  call.share(call.input(0).numel(), 2, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = T(mish(x[i]));
  });
}

void kernel(const Call& call) {
  call.input(0).dtype() == POPSIM_FLOAT16 ? compute<Half>(call)
                                          : compute<float>(call);
}

// The inputs of a gradient are the inputs of the operator (x), its outputs (y),
// and the gradients of the outputs. It writes the gradients of the inputs.
template <typename T>
void compute_gradient(const Call& call) {
  const T* x = call.input_data<T>(0);
  const T* arriving = call.input_data<T>(2);
  T* gradient = call.output_data<T>(0);
  call.share(call.input(0).numel(), 3, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      gradient[i] = T(slope(x[i]) * arriving[i]);
    }
  });
}

void gradient(const Call& call) {
  call.input(0).dtype() == POPSIM_FLOAT16 ? compute_gradient<Half>(call)
                                          : compute_gradient<float>(call);
}

// Returns the approximate number of operations of the loops above, for reports.
popsim_custom_cost cost(const Call& call) {
  return {24.0 * static_cast<double>(call.input(0).numel()), 0.0};
}

popsim_custom_cost gradient_cost(const Call& call) {
  return {32.0 * static_cast<double>(call.input(0).numel()), 0.0};
}

}  // namespace

POPSIM_CUSTOM_OP(Op("tutorial", "Mish", 1)
                     .shapes<shapes>()
                     .kernel<kernel>()
                     .gradient<gradient>()
                     .cost<cost>()
                     .gradient_cost<gradient_cost>())
