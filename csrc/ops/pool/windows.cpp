#include "ops/pool/windows.h"

#include <algorithm>

#include "ops/operands/image_layout.h"

namespace popsim::ops {
namespace {

using Ints = std::vector<int64_t>;

std::vector<PoolWindow> even_windows(int64_t size, int64_t count) {
  std::vector<PoolWindow> windows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i * size / count;
    const int64_t last = ((i + 1) * size + count - 1) / count;
    windows.push_back({first, last, last - first});
  }
  return windows;
}

std::vector<PoolWindow> sliding_windows(const OpView& op, size_t axis,
                                        int64_t size, int64_t count) {
  const int64_t kernel = op.attribute<Ints>("kernel").at(axis);
  const int64_t stride = op.attribute<Ints>("stride").at(axis);
  const int64_t padding = op.attribute<Ints>("padding").at(axis);
  const int64_t dilation = op.attribute<Ints>("dilation").at(axis);
  std::vector<PoolWindow> windows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i * stride - padding;
    const int64_t end = start + (kernel - 1) * dilation + 1;
    int64_t first = start;
    while (first < 0) first += dilation;
    windows.push_back(
        {first, std::min(end, size), std::min(end, size + padding) - start});
  }
  return windows;
}

// An image of one channel or one position.
bool lies_both_ways(const graph::Tensor& tensor) {
  return tensor.shape.at(1) == 1 ||
         tensor.shape.at(2) * tensor.shape.at(3) == 1;
}

bool follow_each_other(const std::vector<PoolWindow>& windows) {
  for (size_t i = 1; i < windows.size(); ++i) {
    if (windows[i].first < windows[i - 1].last) return false;
  }
  return true;
}

}  // namespace

bool PoolGeometry::disjoint() const {
  return follow_each_other(down) && follow_each_other(across);
}

Shape pooled_shape(const OpView& op, const Shape& x) {
  const Ints& size = op.attribute<Ints>("output_size");
  check_internal(x.size() == 4 && size.size() == 2, op.op().kind, " '",
                 op.op().name, "': takes images, got ", to_string(x));
  return {x[0], x[1], size[0], size[1]};
}

PoolGeometry read_pool(const OpView& op, const Shape& x) {
  const Shape y = pooled_shape(op, x);
  PoolGeometry g{.batch = x[0],
                 .channels = x[1],
                 .height = x[2],
                 .width = x[3],
                 .step_down = 1,
                 .step_across = 1,
                 .down = {},
                 .across = {}};
  if (op.has_attribute("adaptive") && op.attribute<bool>("adaptive")) {
    g.down = even_windows(x[2], y[2]);
    g.across = even_windows(x[3], y[3]);
    return g;
  }
  g.step_down = op.attribute<Ints>("dilation").at(0);
  g.step_across = op.attribute<Ints>("dilation").at(1);
  g.down = sliding_windows(op, 0, x[2], y[2]);
  g.across = sliding_windows(op, 1, x[3], y[3]);
  return g;
}

bool pool_channels_last(const OpView& op,
                        std::initializer_list<size_t> inputs) {
  std::vector<const graph::Tensor*> in_place;
  for (const size_t i : inputs) in_place.push_back(&op.input(i));
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    in_place.push_back(&op.output(i));
  }
  for (const graph::Tensor* tensor : in_place) {
    if (!lies_both_ways(*tensor)) return is_channels_last(*tensor);
  }
  return is_channels_last(op.input(0));
}

FloatInput pool_input(const OpView& op, size_t i, bool channels_last,
                      Workspace& workspace) {
  const graph::Tensor& tensor = op.input(i);
  const std::vector<size_t> order = channels_last
                                        ? std::vector<size_t>{0, 2, 3, 1}
                                        : std::vector<size_t>{0, 1, 2, 3};
  return {{op.input_id(i), tensor.dtype, tensor.shape, tensor.strides},
          order,
          false,
          workspace};
}

void check_pool_layouts(const OpView& op, std::initializer_list<size_t> inputs,
                        bool channels_last) {
  const auto check = [&](const graph::Tensor& tensor) {
    const bool good = channels_last && !lies_both_ways(tensor)
                          ? is_channels_last(tensor)
                          : tensor.contiguous();
    check_internal(good, op.op().kind, " '", op.op().name,
                   "': its images lie in memory in different orders");
  };
  for (const size_t i : inputs) check(op.input(i));
  for (size_t i = 0; i < op.num_outputs(); ++i) check(op.output(i));
}

}  // namespace popsim::ops
