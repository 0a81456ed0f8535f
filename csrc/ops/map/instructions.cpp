#include "ops/map/instructions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <tuple>
#include <utility>

#include "ops/math/vec_math.h"

namespace popsim::ops {
namespace {

// An operand of an instruction: a block of values, or one value for the whole
// block.
template <bool kUniform>
class LaneOperand {
 public:
  explicit LaneOperand(const float* values) : values_(values) {}
  [[nodiscard]] Vec at(int64_t i) const { return Vec::loadu(values_ + i); }
  [[nodiscard]] Vec at(int64_t i, int64_t lanes) const {
    return Vec::loadu(values_ + i, lanes);
  }

 private:
  const float* values_;
};

template <>
class LaneOperand<true> {
 public:
  explicit LaneOperand(const float* value) : value_(*value) {}
  [[nodiscard]] Vec at(int64_t /*i*/) const { return value_; }
  [[nodiscard]] Vec at(int64_t /*i*/, int64_t /*lanes*/) const {
    return value_;
  }

 private:
  Vec value_;
};

// The last, partial vector goes through the same vector function, so a value
// does not depend on its position.
template <typename Function, unsigned kMask, size_t... kIndex>
void run_block(float* out, const float* a, const float* b, const float* c,
               int64_t n) {
  const std::array<const float*, kMaxMapOperands> pointers{a, b, c};
  const std::tuple operands{
      LaneOperand<((kMask >> kIndex) & 1) != 0>(pointers[kIndex])...};
  const Function function{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    function(std::get<kIndex>(operands).at(i)...).store(out + i);
  }
  if (i < n) {
    function(std::get<kIndex>(operands).at(i, n - i)...).store(out + i, n - i);
  }
}

template <typename Function, size_t kArity, unsigned... kMasks>
constexpr MapInstruction instruction(
    std::string_view name, int64_t cost,
    std::integer_sequence<unsigned, kMasks...> /*masks*/) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    constexpr unsigned kUsed = (1U << kArity) - 1;
    return MapInstruction{name,
                          kArity,
                          cost,
                          {run_block<Function, kMasks & kUsed, kIndex...>...}};
  }(std::make_index_sequence<kArity>{});
}

template <typename Function>
constexpr size_t arity_of() {
  if constexpr (std::is_invocable_v<Function, Vec>) return 1;
  if constexpr (std::is_invocable_v<Function, Vec, Vec>) return 2;
  return 3;
}

// `function` is a lambda without captures; its type identifies the instruction.
template <typename Function>
constexpr MapInstruction entry(std::string_view name, int64_t cost,
                               Function /*function*/) {
  return instruction<Function, arity_of<Function>()>(
      name, cost,
      std::make_integer_sequence<unsigned, 1U << kMaxMapOperands>{});
}

Vec truth(const Vec& x) { return x != Vec(0.0f); }
Vec one_if(const Vec& mask) { return mask & Vec(1.0f); }

template <typename Type>
Vec rounded_to(const Vec& x) {
  return at::vec::convert<float>(at::vec::convert<Type>(x));
}

template <size_t kSize>
Vec polynomial(const Vec& x, const std::array<float, kSize>& coefficients) {
  Vec sum(coefficients[0]);
  for (size_t i = 1; i < kSize; ++i) {
    sum = at::vec::fmadd(sum, x, Vec(coefficients[i]));
  }
  return sum;
}

// The rational approximation of Eigen and XLA: accurate to a few ulp
// everywhere. at::vec's own erf has an absolute error of up to 1.5e-7 and is
// slower.
Vec erf(const Vec& x) {
  constexpr std::array<float, 7> kNumerator{
      -2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
      -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
      -1.60960333262415e-02f};
  constexpr std::array<float, 5> kDenominator{
      -1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
      -7.37332916720468e-03f, -1.42647390514189e-02f};
  const Vec clamped = at::vec::clamp(x, Vec(-4.0f), Vec(4.0f));
  const Vec square = clamped * clamped;
  return clamped *
         (polynomial(square, kNumerator) / polynomial(square, kDenominator));
}

// Each function computes the same as PyTorch's float32 CPU kernel of that name.
// The bits are the same too, with two exceptions: cos, erf, exp, log, log2,
// sin, sqrt and tanh, where PyTorch calls MKL (if built with it), and the last
// few elements of a tensor, where PyTorch may use the C library instead of
// at::vec.
constexpr std::array kInstructions{
    entry("abs", 1, [](Vec x) { return x.abs(); }),
    entry("add", 1, [](Vec a, Vec b) { return a + b; }),
    entry("and", 2, [](Vec a, Vec b) { return one_if(truth(a) & truth(b)); }),
    entry("bfloat16", 2, [](Vec x) { return rounded_to<at::BFloat16>(x); }),
    entry("ceil", 1, [](Vec x) { return x.ceil(); }),
    // The same as torch.clamp with tensor bounds: NaN bounds give NaN.
    entry("clamp", 4,
          [](Vec x, Vec low, Vec high) {
            return at::vec::minimum(at::vec::maximum(x, low), high);
          }),
    // The same as torch.clamp with number bounds, which treats the sign of
    // zeros differently.
    entry(
        "clamp_to_numbers", 2,
        [](Vec x, Vec low, Vec high) { return at::vec::clamp(x, low, high); }),
    entry("copy", 1, [](Vec x) { return x; }),
    entry("cos", 16, [](Vec x) { return x.cos(); }),
    entry("cube", 2, [](Vec x) { return x * x * x; }),
    entry("div", 6, [](Vec a, Vec b) { return a / b; }),
    entry("eq", 1, [](Vec a, Vec b) { return one_if(a == b); }),
    entry("erf", 14, [](Vec x) { return erf(x); }),
    entry("exp", 10, [](Vec x) { return exp(x); }),
    entry("expm1", 20, [](Vec x) { return x.expm1(); }),
    entry("floor", 1, [](Vec x) { return x.floor(); }),
    entry("ge", 1, [](Vec a, Vec b) { return one_if(a >= b); }),
    entry("gt", 1, [](Vec a, Vec b) { return one_if(a > b); }),
    entry("half", 2, [](Vec x) { return rounded_to<at::Half>(x); }),
    entry("inverse_square", 7, [](Vec x) { return (x * x).reciprocal(); }),
    entry("le", 1, [](Vec a, Vec b) { return one_if(a <= b); }),
    entry("leaky_relu", 2,
          [](Vec x, Vec slope) {
            return x * Vec::blendv(slope, Vec(1.0f), x > Vec(0.0f));
          }),
    entry("log", 14, [](Vec x) { return log(x); }),
    entry("log1p", 20, [](Vec x) { return x.log1p(); }),
    entry("log2", 14, [](Vec x) { return x.log2(); }),
    entry("lt", 1, [](Vec a, Vec b) { return one_if(a < b); }),
    entry("max", 2, [](Vec a, Vec b) { return at::vec::maximum(a, b); }),
    entry("min", 2, [](Vec a, Vec b) { return at::vec::minimum(a, b); }),
    entry("mul", 1, [](Vec a, Vec b) { return a * b; }),
    entry("ne", 1, [](Vec a, Vec b) { return one_if(a != b); }),
    entry("neg", 1, [](Vec x) { return x.neg(); }),
    entry("not", 1, [](Vec x) { return one_if(x == Vec(0.0f)); }),
    entry("or", 2, [](Vec a, Vec b) { return one_if(truth(a) | truth(b)); }),
    entry("pow", 60, [](Vec a, Vec b) { return a.pow(b); }),
    entry("reciprocal", 6, [](Vec x) { return x.reciprocal(); }),
    entry("relu", 1, [](Vec x) { return at::vec::clamp_min(x, Vec(0.0f)); }),
    entry("round", 1, [](Vec x) { return x.round(); }),
    entry("rsqrt", 12, [](Vec x) { return x.rsqrt(); }),
    entry("sigmoid", 18,
          [](Vec x) { return (Vec(1.0f) + exp(Vec(0.0f) - x)).reciprocal(); }),
    entry("sign", 2,
          [](Vec x) { return one_if(Vec(0.0f) < x) - one_if(x < Vec(0.0f)); }),
    entry("sin", 16, [](Vec x) { return x.sin(); }),
    entry("sqrt", 6, [](Vec x) { return x.sqrt(); }),
    entry("square", 1, [](Vec x) { return x * x; }),
    entry("sub", 1, [](Vec a, Vec b) { return a - b; }),
    entry("tanh", 24, [](Vec x) { return tanh(x); }),
    entry("trunc", 1, [](Vec x) { return x.trunc(); }),
    entry("where", 2,
          [](Vec condition, Vec a, Vec b) {
            return Vec::blendv(b, a, truth(condition));
          }),
};

}  // namespace

const MapInstruction* find_map_instruction(std::string_view name) {
  for (const MapInstruction& instruction : kInstructions) {
    if (instruction.name == name) return &instruction;
  }
  return nullptr;
}

}  // namespace popsim::ops
