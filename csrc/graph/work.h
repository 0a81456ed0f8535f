// The work of an op, independent of any machine: amounts of these kinds.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

#include "base/dtype.h"

namespace popsim::graph {

// `batch` products of a matrix [rows, depth] and a matrix [depth, columns].
struct Product {
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  DType dtype = DType::kFloat32;
};

// Convolution kernels of `kernel` numbers, for this number of channels in each
// group, used at `positions` of each image; or the gradient of such a
// convolution.
struct Convolution {
  int64_t batch = 0;
  int64_t positions = 0;
  int64_t kernel = 0;
  int64_t groups = 1;
  int64_t in_channels = 0;  // channels of a group
  int64_t out_channels = 0;
  DType dtype = DType::kFloat32;
};

// This number of elements, each of which costs as much as `cost` additions.
struct Elementwise {
  int64_t elements = 0;
  int64_t cost = 1;
};

// Elements that are added up (or compared) to fewer results.
struct Reduce {
  int64_t elements = 0;
  int64_t results = 1;
};

// Random numbers.
struct Random {
  int64_t elements = 0;
};

// Bytes read and written: every tensor once, including repeated elements.
struct Move {
  int64_t bytes = 0;
};

// Bytes that leave the device.
struct Host {
  int64_t bytes = 0;
};

using Work =
    std::variant<Product, Convolution, Elementwise, Reduce, Random, Move, Host>;

// Number of floating-point operations: two for each multiplication of a
// product.
[[nodiscard]] double flops(const Work& work);
[[nodiscard]] int64_t bytes(const Work& work);
[[nodiscard]] std::string_view name_of(const Work& work);
// The same work, done `times` times.
[[nodiscard]] Work repeated(Work work, int64_t times);

}  // namespace popsim::graph
