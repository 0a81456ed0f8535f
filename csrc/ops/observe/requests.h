// What the op `statistics` is asked for, and the order of its results.
//
// The result is a vector of float64:
//   count, nans, infs          always
//   mean, std, minimum, maximum, norm, absolute_mean     if `moments`
//   zeros, subnormals, half_overflows, half_underflows   if `counts`
//   the lower and the upper 32 bits                      if `fingerprint`
//   values, then positions     min(top, numel) of each; position -1: none
//   values                     min(samples, numel)
//   negative bins, positive bins                 256 << histogram of each
//   zeros, nans, infs, mean, norm, minimum, maximum      of each channel: each
//                                                index of the axis `channels`
// Nothing in it is NaN unless a sample is: where there is no value to compute a
// number from, the number is 0.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/observe/channels.h"
#include "ops/op_def.h"

namespace popsim::ops::observe {

struct Requests {
  explicit Requests(const OpCall& op)
      : moments(op.attribute<bool>("moments")),
        counts(op.attribute<bool>("counts")),
        fingerprint(op.attribute<bool>("fingerprint")),
        top(std::min(op.attribute<int64_t>("top"), op.input(0).numel())),
        samples(
            std::min(op.attribute<int64_t>("samples"), op.input(0).numel())),
        mantissa_bits(op.attribute<int64_t>("histogram")),
        channel_axis(op.attribute<int64_t>("channels")) {
    if (!channels()) return;
    const Shape& shape = op.input(0).shape;
    op.require(channel_axis < static_cast<int64_t>(shape.size()),
               "the input has an axis ", channel_axis);
    num_channels = shape[static_cast<size_t>(channel_axis)];
  }

  [[nodiscard]] bool histogram() const { return mantissa_bits >= 0; }
  // The number of bins of both signs.
  [[nodiscard]] int64_t num_bins() const {
    return histogram() ? int64_t{512} << mantissa_bits : 0;
  }
  [[nodiscard]] bool channels() const { return channel_axis >= 0; }
  // The number of results of all channels, which are the last ones.
  [[nodiscard]] int64_t channel_results() const {
    return Channels::kResults * num_channels;
  }
  // The number of results.
  [[nodiscard]] int64_t length() const {
    return 3 + (moments ? 6 : 0) + (counts ? 4 : 0) + (fingerprint ? 2 : 0) +
           2 * top + samples + num_bins() + channel_results();
  }

  bool moments;
  bool counts;
  bool fingerprint;
  int64_t top;            // as many as the tensor has, at most
  int64_t samples;        // the same
  int64_t mantissa_bits;  // -1: no histogram
  int64_t channel_axis;   // -1: no channels
  int64_t num_channels = 0;
};

}  // namespace popsim::ops::observe
