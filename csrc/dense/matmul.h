// Matrix products in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace popsim::dense {

// Distances between neighbours, in elements.
struct MatrixStrides {
  int64_t batch = 0;  // 0: the same matrix for the whole batch
  int64_t row = 0;
  int64_t column = 0;
};

// c[batch, m, n] = alpha * (a[batch, m, k] @ b[batch, k, n]) + bias[n]
//                  + beta * c, where c is contiguous.
struct MatmulSpec {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  MatrixStrides a;
  MatrixStrides b;
  bool bias = false;  // only with the default alpha and beta
  float alpha = 1.0f;
  float beta = 0.0f;
};

class Matmul {
 public:
  // Null when oneDNN has no fast code for the problem: without oneDNN, for
  // empty matrices, and for matrices without an axis of stride 1.
  [[nodiscard]] static std::unique_ptr<Matmul> create(const MatmulSpec& spec);

  Matmul() = default;
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;
  virtual ~Matmul() = default;

  // Memory that run() needs besides the matrices.
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // `workspace` is aligned to 64 bytes. `bias` is null where the spec has none.
  virtual void run(const float* a, const float* b, const float* bias, float* c,
                   void* workspace) = 0;
};

}  // namespace popsim::dense
