#include "ops/convolution/depthwise_volume.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "ops/math/vec_math.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::ConvolutionPass;
using dense::ConvolutionSpec;
using dense::ConvolutionTensors;
using dense::Extents;
using dense::Order;

// The number of products that are added up one after the other, at least
// those of a row: the error of such a sum grows with its length.
constexpr int64_t kTermsOfPart = 512;

int64_t count_of(const Extents& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

// An element of the kernel, and the position of the source that it is
// multiplied with.
struct Tap {
  int64_t source;
  int64_t element;
};

// By positions of the target.
using Taps = std::vector<std::vector<Tap>>;

// The taps along one axis, either for the output's positions or, if
// `backward`, for those of the input.
Taps taps_along(const ConvolutionSpec& spec, size_t axis, bool backward) {
  const int64_t input = spec.input_size[axis];
  const int64_t output = spec.output_size[axis];
  const int64_t stride = spec.stride[axis];
  Taps taps(static_cast<size_t>(backward ? input : output));
  for (int64_t position = 0; position < output; ++position) {
    for (int64_t k = 0; k < spec.kernel_size[axis]; ++k) {
      const int64_t at =
          position * stride - spec.padding[axis] + k * spec.dilation[axis];
      if (at < 0 || at >= input) continue;
      const Tap tap{backward ? position : at, k};
      taps[static_cast<size_t>(backward ? at : position)].push_back(tap);
    }
  }
  for (auto& list : taps) std::ranges::sort(list, {}, &Tap::element);
  return taps;
}

// The taps along two axes, of which `inner` has the sizes given.
Taps combine(const Taps& outer, const Taps& inner, int64_t inner_sources,
             int64_t inner_elements) {
  Taps taps;
  for (const auto& outer_list : outer) {
    for (const auto& inner_list : inner) {
      auto& list = taps.emplace_back();
      for (const Tap& a : outer_list) {
        for (const Tap& b : inner_list) {
          list.push_back({a.source * inner_sources + b.source,
                          a.element * inner_elements + b.element});
        }
      }
    }
  }
  return taps;
}

// Rows of positions: the target's, and those of source and kernel that they
// need.
struct Rows {
  Taps rows;       // by rows of the target
  Taps positions;  // by positions in a row
  int64_t source_length;
  int64_t kernel_length;

  Rows(const ConvolutionSpec& spec, bool backward)
      : rows({{{.source = 0, .element = 0}}}),
        positions(taps_along(spec, spec.kernel_size.size() - 1, backward)),
        source_length((backward ? spec.output_size : spec.input_size).back()),
        kernel_length(spec.kernel_size.back()) {
    for (size_t axis = 0; axis + 1 < spec.kernel_size.size(); ++axis) {
      rows = combine(rows, taps_along(spec, axis, backward),
                     (backward ? spec.output_size : spec.input_size)[axis],
                     spec.kernel_size[axis]);
    }
  }
};

// Calls body(vectors, first, lanes) for blocks of channels: of several whole
// vectors as long as there are so many, then for the rest of a vector.
template <typename Body>
void for_blocks(int64_t channels, const Body& body) {
  using Whole = std::integral_constant<int64_t, kLanes>;
  int64_t first = 0;
  const auto blocks_of = [&](auto vectors) {
    constexpr int64_t kBlock = decltype(vectors)::value * kLanes;
    for (; first + kBlock <= channels; first += kBlock) {
      body(vectors, first, Whole{});
    }
  };
  blocks_of(std::integral_constant<size_t, 4>{});
  blocks_of(std::integral_constant<size_t, 2>{});
  blocks_of(std::integral_constant<size_t, 1>{});
  if (first < channels) {
    body(std::integral_constant<size_t, 1>{}, first, channels - first);
  }
}

template <size_t kVectors>
using Sums = std::array<Vec, kVectors>;

template <size_t kVectors, typename Lanes>
void add_products(const float* a, const float* b, Lanes lanes,
                  Sums<kVectors>& sums) {
  for (size_t v = 0; v < kVectors; ++v) {
    const auto at = static_cast<int64_t>(v) * kLanes;
    sums[v] = at::vec::fmadd(load(a + at, lanes), load(b + at, lanes), sums[v]);
  }
}

// The convolution, or the gradient of its input: of each position of the
// target, all products are added up in registers.
class DepthwiseVolume final : public dense::Convolution {
 public:
  DepthwiseVolume(const ConvolutionSpec& spec, bool backward)
      : backward_(backward),
        bias_(spec.bias),
        channels_(spec.out_channels),
        kernel_size_(count_of(spec.kernel_size)),
        source_size_(count_of(backward ? spec.output_size : spec.input_size) *
                     channels_),
        rows_(spec, backward),
        shares_(
            threads::multiplications(spec.batch * count_of(spec.output_size) *
                                     channels_ * kernel_size_),
            spec.batch * std::ssize(rows_.rows)) {}

  size_t workspace_bytes() const override {
    return static_cast<size_t>(kernel_size_ * channels_) * sizeof(float);
  }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    auto* weight = static_cast<float*>(workspace);
    for (int64_t c = 0; c < channels_; ++c) {
      for (int64_t k = 0; k < kernel_size_; ++k) {
        weight[k * channels_ + c] = tensors.weight[c * kernel_size_ + k];
      }
    }
    shares_.run([&](int64_t /*share*/, threads::Range rows) {
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        run_row(tensors, weight, row);
      }
    });
  }

 private:
  void run_row(const ConvolutionTensors& tensors, const float* weight,
               int64_t row) const {
    const int64_t num_rows = std::ssize(rows_.rows);
    const float* source = (backward_ ? tensors.output : tensors.input) +
                          row / num_rows * source_size_;
    float* target = (backward_ ? tensors.input : tensors.output) +
                    row * std::ssize(rows_.positions) * channels_;
    const float* bias = bias_ ? tensors.bias : nullptr;
    const auto& taps = rows_.rows[static_cast<size_t>(row % num_rows)];
    for_blocks(channels_, [&](auto vectors, int64_t first, auto lanes) {
      constexpr size_t kVectors = decltype(vectors)::value;
      run_block<kVectors>(source + first, weight + first,
                          bias == nullptr ? nullptr : bias + first,
                          target + first, taps, lanes);
    });
  }

  template <size_t kVectors, typename Lanes>
  void run_block(const float* source, const float* weight, const float* bias,
                 float* target, const std::vector<Tap>& taps,
                 Lanes lanes) const {
    Sums<kVectors> start;
    for (size_t v = 0; v < kVectors; ++v) {
      const auto at = static_cast<int64_t>(v) * kLanes;
      start[v] = bias == nullptr ? Vec(0.0F) : load(bias + at, lanes);
    }
    for (const auto& position : rows_.positions) {
      Sums<kVectors> sums = start;
      for (const Tap& row : taps) {
        const float* from =
            source + row.source * rows_.source_length * channels_;
        const float* by =
            weight + row.element * rows_.kernel_length * channels_;
        for (const Tap& tap : position) {
          add_products<kVectors>(from + tap.source * channels_,
                                 by + tap.element * channels_, lanes, sums);
        }
      }
      for (size_t v = 0; v < kVectors; ++v) {
        store(sums[v], target + static_cast<int64_t>(v) * kLanes, lanes);
      }
      target += channels_;
    }
  }

  bool backward_;
  bool bias_;
  int64_t channels_;
  int64_t kernel_size_;
  int64_t source_size_;  // of a volume
  Rows rows_;
  threads::Shares shares_;
};

// The gradient of the weight. Each task adds up rows of the output.
class DepthwiseVolumeGradWeight final : public dense::Convolution {
 public:
  explicit DepthwiseVolumeGradWeight(const ConvolutionSpec& spec)
      : channels_(spec.out_channels),
        size_(count_of(spec.kernel_size) * channels_),
        input_size_(count_of(spec.input_size) * channels_),
        stride_(spec.stride.back()),
        rows_(spec, false),
        tasks_(threads::multiplications(spec.batch *
                                        count_of(spec.output_size) * size_),
               spec.batch * std::ssize(rows_.rows)) {
    for (int64_t k = 0; k < rows_.kernel_length; ++k) {
      stretches_.push_back(stretch_of(k));
    }
  }

  size_t workspace_bytes() const override {
    return static_cast<size_t>(2 * tasks_.count() * size_) * sizeof(float);
  }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    auto* sums = static_cast<float*>(workspace);
    tasks_.run([&](int64_t task, threads::Range rows) {
      run_task(tensors, rows, sums + 2 * task * size_);
    });
    for (int64_t task = 1; task < tasks_.count(); ++task) {
      add(sums + 2 * task * size_, sums);
    }
    const int64_t kernel_size = size_ / channels_;
    for (int64_t c = 0; c < channels_; ++c) {
      for (int64_t k = 0; k < kernel_size; ++k) {
        tensors.weight[c * kernel_size + k] = sums[k * channels_ + c];
      }
    }
  }

 private:
  // The positions of an output's row that an element of the kernel's row
  // multiplies, and the input's position for the first of them.
  struct Stretch {
    threads::Range output;
    int64_t input;
  };

  [[nodiscard]] Stretch stretch_of(int64_t element) const {
    Stretch stretch{{0, 0}, 0};
    for (int64_t i = 0; i < std::ssize(rows_.positions); ++i) {
      for (const Tap& tap : rows_.positions[static_cast<size_t>(i)]) {
        if (tap.element != element) continue;
        if (stretch.output.size() == 0) stretch = {{i, i}, tap.source};
        stretch.output.end = i + 1;
      }
    }
    return stretch;
  }

  void add(const float* from, float* to) const {
    for (int64_t i = 0; i < size_; ++i) to[i] += from[i];
  }

  // `sums` has the sums of the task, then those of its present part.
  void run_task(const ConvolutionTensors& tensors, threads::Range rows,
                float* sums) const {
    const auto num_rows = std::ssize(rows_.rows);
    const auto length = std::ssize(rows_.positions);
    float* part = sums + size_;
    std::fill_n(sums, 2 * size_, 0.0F);
    int64_t terms = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const float* input = tensors.input + row / num_rows * input_size_;
      const float* output = tensors.output + row * length * channels_;
      for (const Tap& tap : rows_.rows[static_cast<size_t>(row % num_rows)]) {
        add_row(input + tap.source * rows_.source_length * channels_, output,
                part + tap.element * rows_.kernel_length * channels_);
      }
      terms += length;
      if (terms < kTermsOfPart && row + 1 < rows.end) continue;
      add(part, sums);
      std::fill_n(part, size_, 0.0F);
      terms = 0;
    }
  }

  // Adds the products of two rows to the sums of a row of the kernel.
  void add_row(const float* input, const float* output, float* sums) const {
    for_blocks(channels_, [&](auto vectors, int64_t first, auto lanes) {
      constexpr size_t kVectors = decltype(vectors)::value;
      float* to = sums + first;
      for (const Stretch& stretch : stretches_) {
        add_stretch<kVectors>(input + stretch.input * channels_ + first,
                              output + stretch.output.begin * channels_ + first,
                              stretch.output.size(), to, lanes);
        to += channels_;
      }
    });
  }

  template <size_t kVectors, typename Lanes>
  void add_stretch(const float* input, const float* output, int64_t length,
                   float* to, Lanes lanes) const {
    Sums<kVectors> sums;
    for (size_t v = 0; v < kVectors; ++v) {
      sums[v] = load(to + static_cast<int64_t>(v) * kLanes, lanes);
    }
    for (int64_t i = 0; i < length; ++i) {
      add_products<kVectors>(input, output, lanes, sums);
      input += stride_ * channels_;
      output += channels_;
    }
    for (size_t v = 0; v < kVectors; ++v) {
      store(sums[v], to + static_cast<int64_t>(v) * kLanes, lanes);
    }
  }

  int64_t channels_;
  int64_t size_;        // of the weight
  int64_t input_size_;  // of a volume
  int64_t stride_;      // in a row
  Rows rows_;
  std::vector<Stretch> stretches_;  // by elements of the kernel's rows
  threads::Tasks tasks_;
};

bool has_rows(Order order, const Extents& size) {
  return order == Order::kChannelsLast || count_of(size) == 1;
}

}  // namespace

bool is_depthwise_volume(const ConvolutionSpec& spec) {
  return spec.kernel_size.size() == 3 && spec.groups > 1 &&
         spec.groups == spec.in_channels && spec.groups == spec.out_channels &&
         spec.batch * count_of(spec.input_size) * count_of(spec.output_size) *
                 count_of(spec.kernel_size) >
             0;
}

std::unique_ptr<dense::Convolution> create_depthwise_volume(
    const ConvolutionSpec& spec, ConvolutionPass pass) {
  if (!is_depthwise_volume(spec) ||
      !has_rows(spec.input_order, spec.input_size) ||
      !has_rows(spec.output_order, spec.output_size)) {
    return nullptr;
  }
  if (pass == ConvolutionPass::kGradWeight) {
    return std::make_unique<DepthwiseVolumeGradWeight>(spec);
  }
  return std::make_unique<DepthwiseVolume>(spec,
                                           pass == ConvolutionPass::kGradInput);
}

}  // namespace popsim::ops
