// Operands of matrix products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dense/problem/matmul.h"
#include "graph/graph.h"

namespace popsim::ops {

// An operand as a batch of matrices. A repeated batch has size 1.
struct Matrices {
  int64_t batch = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  dense::MatrixStrides strides;
};

// Gives axes of size 1 a stride that a dense matrix would have.
inline void normalise(Matrices& m) {
  if (m.columns == 1) m.strides.column = m.strides.row == 1 ? m.rows : 1;
  if (m.rows == 1) m.strides.row = m.strides.column == 1 ? m.columns : 1;
}

[[nodiscard]] inline Matrices matrices_of(const graph::Tensor& t) {
  const size_t rank = t.shape.size();
  Matrices m;
  m.rows = t.shape[rank - 2];
  m.columns = t.shape[rank - 1];
  m.strides.row = t.strides[rank - 2];
  m.strides.column = t.strides[rank - 1];
  normalise(m);
  if (rank == 3 && t.shape[0] != 1 && t.strides[0] != 0) {
    m.batch = t.shape[0];
    m.strides.batch = t.strides[0];
  }
  return m;
}

[[nodiscard]] inline bool is_row_major(const Matrices& m) {
  return m.strides.row_major(m.columns);
}

[[nodiscard]] inline bool is_plain(const Matrices& m) {
  return m.strides.plain(m.rows, m.columns);
}

}  // namespace popsim::ops
