#include "ops/convolution/patch_map.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace popsim::ops {
namespace {

constexpr int64_t kNone = -1;

int64_t within(int64_t position, int64_t size) {
  return position >= 0 && position < size ? position : kNone;
}

}  // namespace

PatchMap PatchMap::forward(const dense::ConvolutionSpec& spec) {
  PatchMap map;
  for (size_t i = 0; i < spec.kernel_size.size(); ++i) {
    map.append(forward_axis(spec, i));
  }
  return map;
}

PatchMap PatchMap::backward(const dense::ConvolutionSpec& spec) {
  PatchMap map;
  for (size_t i = 0; i < spec.kernel_size.size(); ++i) {
    map.append(backward_axis(spec, i));
  }
  return map;
}

PatchMap::Axis PatchMap::forward_axis(const dense::ConvolutionSpec& spec,
                                      size_t axis) {
  Axis result{spec.input_size[axis],
              spec.output_size[axis],
              spec.kernel_size[axis],
              {}};
  for (int64_t target = 0; target < result.num_targets; ++target) {
    for (int64_t k = 0; k < result.kernel_size; ++k) {
      result.sources.push_back(within(target * spec.stride[axis] -
                                          spec.padding[axis] +
                                          k * spec.dilation[axis],
                                      result.num_sources));
    }
  }
  return result;
}

PatchMap::Axis PatchMap::backward_axis(const dense::ConvolutionSpec& spec,
                                       size_t axis) {
  Axis result{spec.output_size[axis],
              spec.input_size[axis],
              spec.kernel_size[axis],
              {}};
  const int64_t stride = spec.stride[axis];
  for (int64_t target = 0; target < result.num_targets; ++target) {
    for (int64_t k = 0; k < result.kernel_size; ++k) {
      const int64_t position =
          target + spec.padding[axis] - k * spec.dilation[axis];
      result.sources.push_back(
          position % stride == 0 ? within(position / stride, result.num_sources)
                                 : kNone);
    }
  }
  return result;
}

void PatchMap::append(const Axis& axis) {
  check_internal(
      num_sources_ * axis.num_sources <= std::numeric_limits<int32_t>::max(),
      "a convolution of more than 2^31 positions");
  std::vector<int32_t> sources;
  for (int64_t t = 0; t < num_targets_ * axis.num_targets; ++t) {
    const int64_t outer = t / axis.num_targets * kernel_size_;
    const int64_t inner = t % axis.num_targets * axis.kernel_size;
    for (int64_t k = 0; k < kernel_size_ * axis.kernel_size; ++k) {
      const int64_t a =
          sources_[static_cast<size_t>(outer + k / axis.kernel_size)];
      const int64_t b =
          axis.sources[static_cast<size_t>(inner + k % axis.kernel_size)];
      const bool there = a >= 0 && b >= 0;
      sources.push_back(
          static_cast<int32_t>(there ? a * axis.num_sources + b : kNone));
    }
  }
  sources_ = std::move(sources);
  num_sources_ *= axis.num_sources;
  num_targets_ *= axis.num_targets;
  kernel_size_ *= axis.kernel_size;
}

}  // namespace popsim::ops
