// Counts, mean, norm and extremes of each channel: each index of one axis.
//
// A channel's sums depend on the shape and the strides alone, not on threads,
// and go over sixteen lanes on all processors, so these give the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/observe/blocks.h"
#include "ops/operands/float_conversion.h"
#include "ops/operands/strided_walk.h"
#include "threads/tasks.h"

namespace popsim::ops::observe {

class Channels {
 public:
  // How many results there are of each channel.
  static constexpr int64_t kResults = 7;

  // Of input 0, which has the axis.
  Channels(const OpView& op, int64_t axis);

  // Writes all channels' zeros, then their nans, infs, mean, norm, minimum and
  // maximum. The last four are over the finite values, and 0 if there are none.
  void run(const RunContext& context, double* out);

 private:
  // What is known of the values of a channel, or of a part of them.
  struct Total {
    double sum = 0.0;  // this and the next three are of the finite values
    double squares = 0.0;
    int64_t lowest = 0;  // the order of their bits; see channels.cpp
    int64_t highest = 0;
    int64_t zeros = 0;
    int64_t nans = 0;
    int64_t others = 0;  // infinities, too

    // Of no values of type T.
    template <typename T>
    [[nodiscard]] static Total none();
    // Adds what is known of further values.
    void add(const Total& other);
  };
  // The values of a task before they are added up; the other one is empty.
  struct Scratch {
    std::vector<float> floats;
    std::vector<double> doubles;
  };

  template <typename T>
  void run_as(const RunContext& context, double* out);
  template <typename T>
  void add_unit(const void* source, int64_t unit, T* scratch);
  template <typename T>
  void add_columns(const void* source, int64_t group, threads::Range rows,
                   Total* totals, T* scratch) const;
  template <typename T>
  void add_channel(const void* source, int64_t channel, threads::Range values,
                   Total* totals, T* scratch) const;
  template <typename T>
  void load(const void* source, int64_t offset, int64_t stride, int64_t count,
            T* out) const;
  template <typename T>
  void write(int64_t channel, double* out) const;

  graph::TensorId id_;
  LoadFloats load_floats_;
  LoadDoubles load_doubles_;  // null if float32 has all values
  int64_t num_channels_;
  int64_t channel_stride_;
  int64_t num_values_;  // of a channel
  StridedWalk walk_;    // over the values of a channel
  bool in_columns_;     // channels are read side by side, not one by one
  int64_t num_groups_;  // of channels that are read side by side
  int64_t num_parts_;   // of the values of a channel, for few channels
  threads::Tasks tasks_;
  std::vector<Total> totals_;     // of all channels, by part
  std::vector<Scratch> scratch_;  // by task
};

}  // namespace popsim::ops::observe
