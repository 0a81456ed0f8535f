#include "ops/math/reduce_functions.h"

#include <array>
#include <cmath>
#include <limits>

#include "ops/math/vec_math.h"

namespace popsim::ops {
namespace {

struct Sum {
  static constexpr float kIdentity = 0.0f;
  static float of(float a, float b) { return a + b; }
  static Vec of(const Vec& a, const Vec& b) { return a + b; }
};

// NaN is larger than every number, as in PyTorch.
struct Max {
  static constexpr float kIdentity = -std::numeric_limits<float>::infinity();
  static float of(float a, float b) { return std::isnan(a) || a > b ? a : b; }
  static Vec of(const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }
};

struct Min {
  static constexpr float kIdentity = std::numeric_limits<float>::infinity();
  static float of(float a, float b) { return std::isnan(a) || a < b ? a : b; }
  static Vec of(const Vec& a, const Vec& b) { return at::vec::minimum(a, b); }
};

template <typename Op>
float across(const Vec& lanes) {
  return at::vec::vec_reduce_all<float>(
      [](const Vec& a, const Vec& b) { return Op::of(a, b); }, lanes);
}

// A vector with the first `lanes` values, and the identity in the other lanes.
template <typename Op>
Vec load_some(const float* values, int64_t lanes) {
  return Vec::set(Vec(Op::kIdentity), Vec::loadu(values, lanes), lanes);
}

template <typename Op>
float reduce_run(const float* values, int64_t count) {
  if (count <= kLanes) return across<Op>(load_some<Op>(values, count));
  constexpr int64_t kStep = 4 * kLanes;
  Vec sum(Op::kIdentity);
  int64_t i = 0;
  if (count >= kStep) {
    std::array<Vec, 4> parts;
    for (int64_t k = 0; k < 4; ++k) {
      parts[static_cast<size_t>(k)] = Vec::loadu(values + k * kLanes);
    }
    for (i = kStep; i + kStep <= count; i += kStep) {
      for (int64_t k = 0; k < 4; ++k) {
        Vec& part = parts[static_cast<size_t>(k)];
        part = Op::of(part, Vec::loadu(values + i + k * kLanes));
      }
    }
    sum = Op::of(Op::of(parts[0], parts[1]), Op::of(parts[2], parts[3]));
  }
  for (; i + kLanes <= count; i += kLanes) {
    sum = Op::of(sum, Vec::loadu(values + i));
  }
  if (i < count) sum = Op::of(sum, load_some<Op>(values + i, count - i));
  return across<Op>(sum);
}

template <typename Op>
void reduce_runs(const float* values, int64_t stride, int64_t num_runs,
                 int64_t width, float* out) {
  for (int64_t i = 0; i < num_runs; ++i) {
    out[i] = reduce_run<Op>(values + i * stride, width);
  }
}

template <typename Op, int64_t kRows, typename Load>
Vec reduce_column(const float* first, int64_t stride, const Load& load) {
  if constexpr (kRows == 1) {
    return load(first);
  } else {
    return Op::of(
        reduce_column<Op, kRows / 2>(first, stride, load),
        reduce_column<Op, kRows / 2>(first + kRows / 2 * stride, stride, load));
  }
}

// Processes several rows at a time, so the results are read and written less
// often.
template <typename Op, int64_t kRows>
void add_rows(const float* rows, int64_t stride, float* out, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const auto load = [](const float* from) { return Vec::loadu(from); };
    const Vec sum = reduce_column<Op, kRows>(rows + i, stride, load);
    Op::of(Vec::loadu(out + i), sum).store(out + i);
  }
  for (; i < width; ++i) {
    float sum = rows[i];
    for (int64_t r = 1; r < kRows; ++r) sum = Op::of(sum, rows[i + r * stride]);
    out[i] = Op::of(out[i], sum);
  }
}

template <typename Op>
void reduce_rows(const float* rows, int64_t stride, int64_t num_rows,
                 float* out, int64_t width) {
  for (; num_rows >= 8; num_rows -= 8, rows += 8 * stride) {
    add_rows<Op, 8>(rows, stride, out, width);
  }
  for (; num_rows >= 2; num_rows -= 2, rows += 2 * stride) {
    add_rows<Op, 2>(rows, stride, out, width);
  }
  if (num_rows > 0) add_rows<Op, 1>(rows, stride, out, width);
}

template <typename Op>
constexpr ReduceFunctions functions(std::string_view name) {
  return {name, Op::kIdentity, reduce_runs<Op>, reduce_rows<Op>,
          [](float a, float b) { return Op::of(a, b); }};
}

constexpr std::array kFunctions{functions<Sum>("sum"), functions<Max>("amax"),
                                functions<Min>("amin")};

}  // namespace

const ReduceFunctions* find_reduce_functions(std::string_view name) {
  for (const ReduceFunctions& found : kFunctions) {
    if (found.name == name) return &found;
  }
  return nullptr;
}

}  // namespace popsim::ops
