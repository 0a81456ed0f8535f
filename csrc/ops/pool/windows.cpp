#include "ops/pool/windows.h"

#include <algorithm>

#include "base/numbers.h"
#include "ops/operands/image_layout.h"

namespace popsim::ops {
namespace {

using Ints = std::vector<int64_t>;

// A limit that keeps sizes computed from it from overflowing.
constexpr int64_t kMost = int64_t{1} << 30;

std::vector<PoolWindow> even_windows(int64_t size, int64_t count) {
  std::vector<PoolWindow> windows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i * size / count;
    const int64_t last = ceil_div((i + 1) * size, count);
    windows.push_back({first, last, last - first});
  }
  return windows;
}

// The windows along one axis of an image.
struct Sliding {
  int64_t kernel;
  int64_t stride;
  int64_t padding;
  int64_t dilation;

  Sliding(const OpCall& op, size_t axis)
      : kernel(op.attribute<Ints>("kernel")[axis]),
        stride(op.attribute<Ints>("stride")[axis]),
        padding(op.attribute<Ints>("padding")[axis]),
        dilation(op.attribute<Ints>("dilation")[axis]) {}

  [[nodiscard]] int64_t span() const { return (kernel - 1) * dilation + 1; }
  // As in PyTorch: with `ceil`, the last window may extend beyond the end, but
  // must begin inside the image or before it.
  [[nodiscard]] int64_t count(int64_t size, bool ceil) const {
    const int64_t room = size + 2 * padding - span();
    if (room < 0 && !(ceil && room + stride > 0)) return 0;
    int64_t last = (room + (ceil ? stride - 1 : 0)) / stride;
    if (ceil && last * stride >= size + padding) --last;
    return last + 1;
  }
};

std::vector<PoolWindow> sliding_windows(const OpCall& op, size_t axis,
                                        int64_t size, int64_t count) {
  const Sliding windows(op, axis);
  std::vector<PoolWindow> result;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i * windows.stride - windows.padding;
    const int64_t end = start + windows.span();
    int64_t first = start;
    while (first < 0) first += windows.dilation;
    result.push_back({first, std::min(end, size),
                      std::min(end, size + windows.padding) - start});
  }
  return result;
}

// Whether an image has only one channel or one position, so that it is both
// contiguous and channels last.
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

bool have_one_size(const PoolWindow& a, const PoolWindow& b) {
  return a.last - a.first == b.last - b.first && a.full == b.full;
}

}  // namespace

EvenWindows most_even(const std::vector<PoolWindow>& windows) {
  EvenWindows most;
  for (size_t begin = 0; begin < windows.size();) {
    EvenWindows run{.begin = begin, .end = begin + 1};
    for (; run.end < windows.size(); ++run.end) {
      const PoolWindow& before = windows[run.end - 1];
      const PoolWindow& next = windows[run.end];
      const int64_t distance = next.first - before.first;
      if (run.end == begin + 1) run.distance = distance;
      if (!have_one_size(before, next) || distance != run.distance) break;
    }
    if (run.end - run.begin > most.end - most.begin) most = run;
    begin = run.end;
  }
  return most;
}

bool PoolGeometry::disjoint() const {
  return follow_each_other(down) && follow_each_other(across);
}

Shape pooled_shape(const OpCall& op, const Shape& x) {
  op.require(x.size() == 4 && is_valid_shape(x) && num_elements(x) > 0,
             "the image has four axes and is not empty");
  if (op.has_attribute("output_size")) {
    const Ints& size = op.attribute<Ints>("output_size");
    return {x[0], x[1], size[0], size[1]};
  }
  Shape y{x[0], x[1]};
  for (const size_t axis : {0, 1}) {
    const Sliding windows(op, axis);
    op.require(windows.kernel < kMost && windows.stride < kMost &&
                   windows.dilation < kMost &&
                   windows.padding <= windows.span() / 2,
               "the padding is at most half of the kernel");
    y.push_back(windows.count(x[axis + 2], op.attribute<bool>("ceil")));
    op.require(y.back() > 0, "the kernel fits into the image");
  }
  return y;
}

PoolGeometry read_pool(const OpCall& op, const Shape& x) {
  const Shape y = pooled_shape(op, x);
  PoolGeometry g{.batch = x[0],
                 .channels = x[1],
                 .height = x[2],
                 .width = x[3],
                 .step_down = 1,
                 .step_across = 1,
                 .down = {},
                 .across = {}};
  if (op.has_attribute("output_size")) {
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

namespace {

std::vector<graph::Work> window_work(const OpView& op, const Shape& x) {
  const PoolGeometry g = read_pool(op, x);
  const auto covered = [](const std::vector<PoolWindow>& windows,
                          int64_t step) {
    int64_t sum = 0;
    for (const PoolWindow& window : windows) {
      sum += ceil_div(std::max<int64_t>(window.last - window.first, 0), step);
    }
    return sum;
  };
  const int64_t images = g.batch * g.channels;
  return {graph::Reduce{
      images * covered(g.down, g.step_down) * covered(g.across, g.step_across),
      images * g.output_size()}};
}

}  // namespace

std::vector<graph::Work> pool_work(const OpView& op) {
  return window_work(op, op.input(0).shape);
}

std::vector<graph::Work> pool_grad_work(const OpView& op) {
  return window_work(op, op.output(0).shape);
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
                   "': its images have different orders in memory");
  };
  for (const size_t i : inputs) check(op.input(i));
  for (size_t i = 0; i < op.num_outputs(); ++i) check(op.output(i));
}

}  // namespace popsim::ops
