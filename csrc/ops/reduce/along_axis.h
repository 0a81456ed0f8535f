// A tensor as [outer, size, inner]: computations along `size`, in columns.
#pragma once

#include "base/numbers.h"
#include "ops/op_def.h"
#include "threads/tasks.h"

namespace popsim::ops {

class AlongAxis {
 public:
  // Number of neighbouring columns that are computed together.
  static constexpr int64_t kColumns = 256;

  // `cost`: how many passes over the elements the computation is worth.
  AlongAxis(const OpView& op, const Shape& shape, int64_t cost)
      : AlongAxis(shape, op.attribute<int64_t>("axis"), cost) {}

  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] int64_t inner() const { return inner_; }
  // The largest number of threads.
  [[nodiscard]] int64_t limit() const { return shares_.limit(); }

  // Calls body(share, first element, number of columns). The elements below
  // each other are inner() apart.
  template <typename Body>
  void run(const Body& body) const {
    shares_.run([&](int64_t share, threads::Range units) {
      for (int64_t unit = units.begin; unit < units.end; ++unit) {
        const int64_t column = unit % blocks_ * kColumns;
        body(share, unit / blocks_ * size_ * inner_ + column,
             std::min(kColumns, inner_ - column));
      }
    });
  }

 private:
  AlongAxis(const Shape& shape, int64_t axis, int64_t cost) {
    const auto at = shape.begin() + static_cast<ptrdiff_t>(axis);
    size_ = *at;
    inner_ = num_elements({at + 1, shape.end()});
    blocks_ = ceil_div(inner_, kColumns);
    shares_ = threads::Shares(threads::elements(cost * num_elements(shape)),
                              num_elements({shape.begin(), at}) * blocks_);
  }

  int64_t size_;
  int64_t inner_;
  int64_t blocks_;  // of columns
  threads::Shares shares_;
};

inline void require_axis(const OpCall& op) {
  const auto axis = op.attribute<int64_t>("axis");
  op.require(axis < static_cast<int64_t>(op.input(0).shape.size()),
             "the input has an axis ", axis);
}

}  // namespace popsim::ops
