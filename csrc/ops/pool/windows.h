// The windows that pooling slides over an image.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "threads/tasks.h"

namespace popsim::ops {

// The positions of an axis that one output position covers: first, first +
// step, ... < last.
struct PoolWindow {
  int64_t first;
  int64_t last;
  int64_t full;  // number of positions, including those in the padding
};

// Windows that follow each other at one distance and have one size.
struct EvenWindows {
  size_t begin = 0;
  size_t end = 0;
  int64_t distance = 1;
};

// The most such windows that are adjacent.
[[nodiscard]] EvenWindows most_even(const std::vector<PoolWindow>& windows);

struct PoolGeometry {
  int64_t batch;
  int64_t channels;
  int64_t height;
  int64_t width;
  int64_t step_down;
  int64_t step_across;
  std::vector<PoolWindow> down;    // by output row
  std::vector<PoolWindow> across;  // by output column

  [[nodiscard]] int64_t input_size() const { return height * width; }
  [[nodiscard]] int64_t output_size() const {
    return static_cast<int64_t>(down.size() * across.size());
  }
  // Whether a position belongs to at most one window.
  [[nodiscard]] bool disjoint() const;
};

// `x`: shape of the input. Attributes: kernel, stride, padding, dilation, two
// values each, and ceil: the last windows may extend beyond the end. Or only
// output_size: that many windows cover the input evenly.
[[nodiscard]] PoolGeometry read_pool(const OpCall& op, const Shape& x);
// The shape of the result. Throws InternalError if the attributes do not fit an
// image of shape `x`.
[[nodiscard]] Shape pooled_shape(const OpCall& op, const Shape& x);
// Whether the op works on images with their channels last, as its outputs have
// them, and the inputs that it reads in place.
[[nodiscard]] bool pool_channels_last(const OpView& op,
                                      std::initializer_list<size_t> inputs);
// Throws InternalError if one of them has another order in memory.
void check_pool_layouts(const OpView& op, std::initializer_list<size_t> inputs,
                        bool channels_last);
// Channels last or contiguous; copied if necessary.
[[nodiscard]] FloatInput pool_input(const OpView& op, size_t i,
                                    bool channels_last, Workspace& workspace);

// Counts every position that windows cover, once for each window.
[[nodiscard]] std::vector<graph::Work> pool_work(const OpView& op);
[[nodiscard]] std::vector<graph::Work> pool_grad_work(const OpView& op);

// Calls visit(position) for the positions of a window, row by row.
template <typename Visit>
void for_each_position(const PoolGeometry& g, const PoolWindow& down,
                       const PoolWindow& across, Visit&& visit) {
  for (int64_t h = down.first; h < down.last; h += g.step_down) {
    for (int64_t w = across.first; w < across.last; w += g.step_across) {
      visit(h * g.width + w);
    }
  }
}

}  // namespace popsim::ops
