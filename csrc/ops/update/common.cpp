#include "ops/update/common.h"

#include <ATen/cpu/vec/vec.h>

namespace popsim::ops::update {

// A function without errno: std::sqrt may set errno, so compilers do not
// vectorise a loop with it.
void square_roots(float* values, int64_t size) {
  using Vector = at::vec::Vectorized<float>;
  for (int64_t i = 0; i < size; i += Vector::size()) {
    const int64_t lanes = std::min<int64_t>(Vector::size(), size - i);
    Vector::loadu(values + i, lanes).sqrt().store(values + i, lanes);
  }
}

double sum_of_squares(const float* values, int64_t size) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> lanes{};
  const float* end = values + size;
  for (; end - values >= int64_t{kLanes}; values += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = multiply_add(values[lane], values[lane], lanes[lane]);
    }
  }
  for (size_t lane = 0; values < end; ++values, ++lane) {
    lanes[lane] = multiply_add(*values, *values, lanes[lane]);
  }
  double sum = 0.0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

}  // namespace popsim::ops::update
