// Copies elements between two layouts of a shape, as planes of rows and columns
// that are chosen when the copy is prepared.
#pragma once

#include <cstdint>

#include "base/shape.h"
#include "ops/op_def.h"
#include "threads/tasks.h"

namespace popsim::ops {

struct CopyAxis {
  int64_t size = 1;
  int64_t from = 0;  // strides, in elements
  int64_t to = 0;
};

struct CopyPlan {
  std::vector<CopyAxis> outer;
  CopyAxis rows;
  CopyAxis columns;  // adjacent in the target, if possible
};

// Copies elements without interpreting them.
class LayoutCopy {
 public:
  // The tensors must have the same shape and dtype.
  LayoutCopy(const graph::Tensor& from, const graph::Tensor& to);

  // `from` and `to` must point to the first elements.
  void run(const void* from, void* to) const;

 private:
  template <typename T>
  void run_as(const void* from, void* to) const;
  template <typename T>
  void copy_unit(const T* from, T* to, int64_t unit) const;
  template <typename T>
  void copy_rows(const T* from, T* to, int64_t count) const;
  template <typename T>
  void transpose(const T* from, T* to, int64_t rows) const;

  CopyPlan plan_;
  int64_t item_bytes_;
  bool transposes_;
  int64_t rows_per_unit_;
  int64_t units_per_plane_;
  threads::Shares shares_;  // of units
};

}  // namespace popsim::ops
