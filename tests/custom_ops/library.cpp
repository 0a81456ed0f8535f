// Operators of the tests, most of them with something wrong.
#include <popsim_custom_op.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

using popsim::Call;
using popsim::Half;
using popsim::Tensor;

namespace {

// --- Cube: scale * x^3 of float32 or float16, on several threads ---

void cube_shapes(const Call& call) {
  call.require(call.num_inputs() == 1, "it takes one input");
  const int32_t dtype = call.input(0).dtype();
  call.require(dtype == POPSIM_FLOAT32 || dtype == POPSIM_FLOAT16,
               "it takes float32 or float16");
  call.declare_like(call.input(0));
}

template <typename T, typename Body>
void each(const Call& call, const Body& body) {
  call.share(call.output(0).numel(), 3, [&](int64_t begin, int64_t end) {
    T* y = call.output_data<T>(0);
    for (int64_t i = begin; i < end; ++i) y[i] = T(body(i));
  });
}

template <typename T>
void cube_of(const Call& call) {
  const auto scale = static_cast<float>(call.attribute<double>("scale", 1.0));
  const T* x = call.input_data<T>(0);
  each<T>(call, [&](int64_t i) { return scale * x[i] * x[i] * x[i]; });
}

void cube(const Call& call) {
  call.input(0).dtype() == POPSIM_FLOAT32 ? cube_of<float>(call)
                                          : cube_of<Half>(call);
}

template <typename T>
void cube_gradient_of(const Call& call) {
  const auto scale = static_cast<float>(call.attribute<double>("scale", 1.0));
  const T* x = call.input_data<T>(0);
  const T* gradient = call.input_data<T>(2);
  each<T>(call,
          [&](int64_t i) { return 3.0F * scale * x[i] * x[i] * gradient[i]; });
}

void cube_gradient(const Call& call) {
  call.input(0).dtype() == POPSIM_FLOAT32 ? cube_gradient_of<float>(call)
                                          : cube_gradient_of<Half>(call);
}

popsim_custom_cost cube_cost(const Call& call) {
  return {3.0 * static_cast<double>(call.input(0).numel()), 0.0};
}

popsim_custom_cost cube_gradient_cost(const Call& call) {
  return {4.0 * static_cast<double>(call.input(0).numel()), 77.0};
}

// --- ScaledRows: rows of a matrix by whole numbers, and their sums; several
// inputs and outputs, with and without gradients ---

void rows_shapes(const Call& call) {
  call.require(call.num_inputs() == 2, "it takes x and factors");
  const Tensor x = call.input(0);
  const Tensor factors = call.input(1);
  call.require(x.dtype() == POPSIM_FLOAT32 && x.rank() == 2,
               "x is a matrix of float32");
  call.require(factors.dtype() == POPSIM_INT32 && factors.rank() == 1 &&
                   factors.size(0) == x.size(0),
               "there is a factor of int32 for each row");
  call.declare_like(x);
  call.declare(POPSIM_INT32, {x.size(0)});
  call.declare(POPSIM_FLOAT32, {x.size(0)});
}

void rows(const Call& call) {
  const int64_t width = call.input(0).size(1);
  const float* x = call.input_data<float>(0);
  const int32_t* factors = call.input_data<int32_t>(1);
  for (int64_t row = 0; row < call.input(0).size(0); ++row) {
    float sum = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      call.output_data<float>(0)[i] = static_cast<float>(factors[row]) * x[i];
      sum += x[i];
    }
    call.output_data<int32_t>(1)[row] = 2 * factors[row];
    call.output_data<float>(2)[row] = sum;
  }
}

void rows_gradient(const Call& call) {
  call.require(call.num_inputs() == 7 && call.num_outputs() == 1,
               "two inputs, three outputs, two gradients");
  const int64_t width = call.input(0).size(1);
  const int32_t* factors = call.input_data<int32_t>(1);
  for (int64_t i = 0; i < call.input(0).numel(); ++i) {
    call.output_data<float>(0)[i] =
        static_cast<float>(factors[i / width]) * call.input_data<float>(5)[i] +
        call.input_data<float>(6)[i / width];
  }
}

// --- Told: what its attributes are, as numbers ---

void told_shapes(const Call& call) { call.declare(POPSIM_FLOAT32, {7}); }

void told(const Call& call) {
  float* y = call.output_data<float>(0);
  y[0] = static_cast<float>(call.attribute<int64_t>("whole"));
  y[1] = static_cast<float>(call.attribute<double>("number"));
  y[2] = static_cast<float>(call.attribute<std::string>("word").size());
  y[3] = static_cast<float>(call.attribute_list<int64_t>("wholes").back());
  y[4] = static_cast<float>(call.attribute_list<double>("numbers").back());
  y[5] = static_cast<float>(
      call.attribute_list<std::string>("words").back().size());
  y[6] = call.has_attribute("absent") ? 1.0F : 0.0F;
}

// --- Faulty: what `fault` says ---

bool is(const Call& call, const char* fault) {
  return call.attribute<std::string>("fault") == fault;
}

void faulty_shapes(const Call& call) {
  if (is(call, "no outputs")) return;
  if (is(call, "no type")) return call.declare(99, {2});
  if (is(call, "a negative size")) return call.declare(POPSIM_FLOAT32, {-2});
  if (is(call, "another shape")) return call.declare(POPSIM_FLOAT32, {2, 9});
  if (is(call, "another type")) return call.declare(POPSIM_INT32, {4});
  if (is(call, "throws in its shape rule")) throw std::logic_error("no shape");
  call.declare_like(call.input(0));
}

void faulty(const Call& call) {
  auto* y = static_cast<char*>(static_cast<void*>(call.output_data<float>(0)));
  const size_t bytes = 4 * static_cast<size_t>(call.output(0).numel());
  std::memset(y, 0, bytes);
  if (is(call, "throws")) throw std::runtime_error("out of luck");
  if (is(call, "throws a number")) throw 3;
  if (is(call, "another element type")) call.output_data<int32_t>(0);
  if (is(call, "no such input")) call.input(5);
  if (is(call, "throws on a thread")) {
    call.share(call.output(0).numel(), 1 << 20, [](int64_t begin, int64_t) {
      if (begin == 0) throw std::runtime_error("a part failed");
    });
  }
  if (is(call, "writes after its output")) y[bytes] = 1;
  if (is(call, "reads in front of its input")) {
    y[0] = reinterpret_cast<const char*>(call.input_data<float>(0))[-1];
  }
  if (is(call, "writes to its input")) {
    const_cast<float*>(call.input_data<float>(0))[0] = 5;
  }
}

popsim_custom_cost faulty_cost(const Call& call) {
  if (is(call, "throws in its cost")) throw std::runtime_error("not countable");
  return {is(call, "a negative cost") ? -1.0 : 1.0, 0.0};
}

}  // namespace

POPSIM_CUSTOM_OP(Op("popsim_tests", "Cube", 1)
                     .shapes<cube_shapes>()
                     .kernel<cube>()
                     .gradient<cube_gradient>()
                     .cost<cube_cost>()
                     .gradient_cost<cube_gradient_cost>())
POPSIM_CUSTOM_OP(Op("popsim_tests", "CubeWithoutGradient", 1)
                     .shapes<cube_shapes>()
                     .kernel<cube>())
POPSIM_CUSTOM_OP(Op("popsim_tests", "ScaledRows", 2)
                     .shapes<rows_shapes>()
                     .kernel<rows>()
                     .gradient<rows_gradient>())
POPSIM_CUSTOM_OP(
    Op("popsim_tests", "Told", 1).shapes<told_shapes>().kernel<told>().alone())
POPSIM_CUSTOM_OP(Op("popsim_tests", "Faulty", 1)
                     .shapes<faulty_shapes>()
                     .kernel<faulty>()
                     .cost<faulty_cost>())

// For a test of Half: what a float becomes.
extern "C" __attribute__((visibility("default"))) void to_half_and_back(
    const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = Half(x[i]);
}
