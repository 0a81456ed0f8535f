#include "ops/observe/channels.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "base/numbers.h"

namespace popsim::ops::observe {
namespace {

constexpr int64_t kChannelLanes = 16;
constexpr int64_t kColumns = 4 * kChannelLanes;  // channels side by side
// With fewer channels, most of the lanes would have none.
constexpr int64_t kFewChannels = 8;
// With fewer values of a channel, it costs more to begin a channel than to read
// channels side by side that are far from each other.
constexpr int64_t kFewValues = 64;
// Each value is converted and costs some vector instructions.
constexpr int64_t kChannelValueCost = 4;

// Numbers are compared as bits: so a thread that takes subnormal numbers for
// zero finds the same ones.
template <typename T>
struct NumberBits;

template <>
struct NumberBits<float> {
  using Type = int32_t;
  static constexpr Type kInfinity = 0x7f800000;
  static constexpr Type kLargestZero = 0;
};

template <>
struct NumberBits<double> {
  using Type = int64_t;
  static constexpr Type kInfinity = 0x7ff0000000000000;
  // 2^-150: what is 0 in float32 counts as zero.
  static constexpr Type kLargestZero = int64_t{1023 - 150} << 52;
};

// The bits of numbers, such that a larger number has a larger order. Its own
// inverse.
template <typename Bits>
Bits order_of(Bits bits) {
  constexpr int kSign = 8 * sizeof(Bits) - 1;
  return bits ^ ((bits >> kSign) & std::numeric_limits<Bits>::max());
}

template <typename T>
struct ChannelLanes {
  using Bits = typename NumberBits<T>::Type;
  template <typename Number>
  using Each = std::array<Number, kChannelLanes>;

  ChannelLanes() {
    lowest.fill(std::numeric_limits<Bits>::max());
    highest.fill(std::numeric_limits<Bits>::min());
  }

  // Counts a value, and returns it; 0 if it is not finite.
  T count(T value, size_t lane) {
    using Numbers = NumberBits<T>;
    const auto bits = std::bit_cast<Bits>(value);
    const Bits magnitude = bits & std::numeric_limits<Bits>::max();
    const Bits other = magnitude >= Numbers::kInfinity ? -1 : 0;
    zeros[lane] += magnitude <= Numbers::kLargestZero ? 1 : 0;
    nans[lane] += magnitude > Numbers::kInfinity ? 1 : 0;
    others[lane] -= other;
    const Bits order = order_of(bits) & ~other;
    lowest[lane] = std::min<Bits>(
        lowest[lane], order | (other & std::numeric_limits<Bits>::max()));
    highest[lane] = std::max<Bits>(
        highest[lane], order | (other & std::numeric_limits<Bits>::min()));
    return std::bit_cast<T>(bits & ~other);
  }
  void sum(T finite, size_t lane) {
    const auto x = static_cast<double>(finite);
    sums[lane] += x;
    squares[lane] += x * x;
  }

  Each<double> sums{};
  Each<double> squares{};
  Each<Bits> lowest;
  Each<Bits> highest;
  Each<Bits> zeros{};
  Each<Bits> nans{};
  Each<Bits> others{};
};

// Adds rows of as many values as there are lanes, `pitch` values apart. Two
// loops that are not unrolled: compilers make vectors of these.
template <typename T>
ChannelLanes<T> lanes_of(const T* values, int64_t rows, int64_t pitch) {
  ChannelLanes<T> lanes;
  std::array<T, kChannelLanes> finite;
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 1
    for (size_t lane = 0; lane < kChannelLanes; ++lane) {
      finite[lane] = lanes.count(values[lane], lane);
    }
#pragma GCC unroll 1
    for (size_t lane = 0; lane < kChannelLanes; ++lane) {
      lanes.sum(finite[lane], lane);
    }
    values += pitch;
  }
  return lanes;
}

template <typename Total, typename T>
Total total_of(const ChannelLanes<T>& lanes, size_t lane) {
  return {lanes.sums[lane],    lanes.squares[lane], lanes.lowest[lane],
          lanes.highest[lane], lanes.zeros[lane],   lanes.nans[lane],
          lanes.others[lane]};
}

// The axes of a channel's values, in the order of memory.
MergedAxes axes_without(const Shape& shape, const Strides& strides,
                        int64_t axis) {
  Shape sizes = shape;
  Strides steps = strides;
  sizes.erase(sizes.begin() + axis);
  steps.erase(steps.begin() + axis);
  return merge_axes(sizes, std::span(&steps, 1), steps);
}

StridedWalk walk_without(const graph::Tensor& tensor, int64_t axis) {
  const MergedAxes axes = axes_without(tensor.shape, tensor.strides, axis);
  return {axes.sizes, axes.strides[0]};
}

// Whether channels are closer to each other in memory than a channel's values.
bool channels_are_close(const graph::Tensor& tensor, int64_t axis) {
  const MergedAxes axes = axes_without(tensor.shape, tensor.strides, axis);
  return tensor.strides[static_cast<size_t>(axis)] <= axes.strides[0].back();
}

}  // namespace

Channels::Channels(const OpView& op, int64_t axis)
    : id_(op.input_id(0)),
      load_floats_(load_floats(op.input(0).dtype)),
      load_doubles_(doubles_of(op.input(0).dtype)),
      num_channels_(op.input(0).shape[static_cast<size_t>(axis)]),
      channel_stride_(op.input(0).strides[static_cast<size_t>(axis)]),
      num_values_(op.input(0).numel() / std::max<int64_t>(num_channels_, 1)),
      walk_(walk_without(op.input(0), axis)),
      in_columns_(
          num_channels_ >= kFewChannels &&
          (num_values_ < kFewValues || channels_are_close(op.input(0), axis))),
      num_groups_(in_columns_ ? ceil_div(num_channels_, kColumns)
                              : num_channels_),
      num_parts_(1) {
  const threads::Work work =
      threads::elements(kChannelValueCost * op.input(0).numel());
  if (work.threads > 1) {
    num_parts_ = ceil_div(threads::Tasks::kMax, num_groups_);
  }
  tasks_ = threads::Tasks(work, num_parts_ * num_groups_);
  totals_.resize(static_cast<size_t>(num_parts_ * num_channels_));
  scratch_.resize(static_cast<size_t>(tasks_.count()));
  for (Scratch& scratch : scratch_) {
    if (load_doubles_ == nullptr) {
      scratch.floats.resize(kBlock);
    } else {
      scratch.doubles.resize(kBlock);
    }
  }
}

void Channels::run(const RunContext& context, double* out) {
  if (load_doubles_ == nullptr) {
    run_as<float>(context, out);
  } else {
    run_as<double>(context, out);
  }
}

template <typename T>
void Channels::run_as(const RunContext& context, double* out) {
  tasks_.run([&](int64_t task, threads::Range units) {
    Scratch& scratch = scratch_[static_cast<size_t>(task)];
    T* values = nullptr;
    if constexpr (std::is_same_v<T, float>) {
      values = scratch.floats.data();
    } else {
      values = scratch.doubles.data();
    }
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      add_unit(context.data(id_), unit, values);
    }
  });
  for (int64_t i = 0; i < num_channels_; ++i) write<T>(i, out + i);
}

// Adds up a part of the values of some channels.
template <typename T>
void Channels::add_unit(const void* source, int64_t unit, T* scratch) {
  const int64_t part = unit / num_groups_;
  const int64_t group = unit % num_groups_;
  const threads::Range values = threads::part(num_values_, part, num_parts_);
  Total* totals = totals_.data() + part * num_channels_;
  if (in_columns_) {
    add_columns(source, group, values, totals, scratch);
  } else {
    add_channel(source, group, values, totals, scratch);
  }
}

template <typename T>
void Channels::add_columns(const void* source, int64_t group,
                           threads::Range rows, Total* totals,
                           T* scratch) const {
  const int64_t first = group * kColumns;
  const int64_t columns = std::min(kColumns, num_channels_ - first);
  const int64_t pitch = ceil_div(columns, kChannelLanes) * kChannelLanes;
  const int64_t at_once = kBlock / pitch;
  std::fill_n(totals + first, columns, Total::template none<T>());
  for (int64_t row = rows.begin; row < rows.end; row += at_once) {
    const int64_t count = std::min(at_once, rows.end - row);
    T* out = scratch;
    walk_.for_each_run(
        row, count, [&](int64_t offset, int64_t stride, int64_t run) {
          for (int64_t i = 0; i < run; ++i, out += pitch) {
            load(source, offset + i * stride + first * channel_stride_,
                 channel_stride_, columns, out);
          }
        });
    for (int64_t column = 0; column < columns; column += kChannelLanes) {
      const auto lanes = lanes_of(scratch + column, count, pitch);
      const int64_t used = std::min(kChannelLanes, columns - column);
      for (int64_t lane = 0; lane < used; ++lane) {
        totals[first + column + lane].add(
            total_of<Total>(lanes, static_cast<size_t>(lane)));
      }
    }
  }
}

template <typename T>
void Channels::add_channel(const void* source, int64_t channel,
                           threads::Range values, Total* totals,
                           T* scratch) const {
  Total total = Total::template none<T>();
  for (int64_t first = values.begin; first < values.end; first += kBlock) {
    const int64_t count = std::min(kBlock, values.end - first);
    T* out = scratch;
    walk_.for_each_run(
        first, count, [&](int64_t offset, int64_t stride, int64_t run) {
          load(source, offset + channel * channel_stride_, stride, run, out);
          out += run;
        });
    const int64_t rows = count / kChannelLanes;
    auto lanes = lanes_of(scratch, rows, kChannelLanes);
    for (int64_t i = rows * kChannelLanes; i < count; ++i) {
      const auto lane = static_cast<size_t>(i % kChannelLanes);
      lanes.sum(lanes.count(scratch[i], lane), lane);
    }
    const auto used = static_cast<size_t>(std::min(kChannelLanes, count));
    for (size_t lane = 0; lane < used; ++lane) {
      total.add(total_of<Total>(lanes, lane));
    }
  }
  totals[channel] = total;
}

template <typename T>
void Channels::load(const void* source, int64_t offset, int64_t stride,
                    int64_t count, T* out) const {
  if constexpr (std::is_same_v<T, float>) {
    load_floats_(source, offset, stride, count, out);
  } else {
    load_doubles_(source, offset, stride, count, out);
  }
}

template <typename T>
Channels::Total Channels::Total::none() {
  using Bits = typename NumberBits<T>::Type;
  Total total;
  total.lowest = std::numeric_limits<Bits>::max();
  total.highest = std::numeric_limits<Bits>::min();
  return total;
}

void Channels::Total::add(const Total& other) {
  sum += other.sum;
  squares += other.squares;
  lowest = std::min(lowest, other.lowest);
  highest = std::max(highest, other.highest);
  zeros += other.zeros;
  nans += other.nans;
  others += other.others;
}

// Adds up the parts of a channel, and writes its results.
template <typename T>
void Channels::write(int64_t channel, double* out) const {
  Total all = totals_[static_cast<size_t>(channel)];
  for (int64_t part = 1; part < num_parts_; ++part) {
    all.add(totals_[static_cast<size_t>(part * num_channels_ + channel)]);
  }
  using Bits = typename NumberBits<T>::Type;
  const auto number = [](int64_t order) {
    const T value = std::bit_cast<T>(order_of(static_cast<Bits>(order)));
    return static_cast<double>(value) + 0.0;  // 0 instead of -0
  };
  std::array<double, kResults> results{};
  results[0] = static_cast<double>(all.zeros);
  results[1] = static_cast<double>(all.nans);
  results[2] = static_cast<double>(all.others - all.nans);
  if (const int64_t finite = num_values_ - all.others; finite > 0) {
    results[3] = all.sum / static_cast<double>(finite);
    results[4] = std::sqrt(all.squares);
    results[5] = number(all.lowest);
    results[6] = number(all.highest);
  }
  for (const double result : results) {
    *out = result;
    out += num_channels_;
  }
}

}  // namespace popsim::ops::observe
