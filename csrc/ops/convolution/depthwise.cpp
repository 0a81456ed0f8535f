#include "ops/convolution/depthwise.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/numbers.h"
#include "ops/convolution/patch_map.h"
#include "ops/math/vec_math.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::ConvolutionPass;
using dense::ConvolutionSpec;
using dense::ConvolutionTensors;
using dense::Order;

// The vectors that are summed up side by side, so that none waits for the one
// before.
constexpr int64_t kVectors = 4;
constexpr int64_t kBlock = kVectors * kLanes;
// The largest number of products that are added up one after the other: the
// error of such a sum grows with its length.
constexpr size_t kMaxTerms = 512;
// The largest number of positions whose channels stay in the caches while all
// elements of the kernel read them.
constexpr int64_t kMaxPositions = 1024;

// A position of the output and the one of the input that an element of the
// kernel multiplies there, as offsets of their first channels.
struct Pair {
  int64_t output;
  int64_t input;
};

class DepthwiseGradWeight final : public dense::Convolution {
 public:
  DepthwiseGradWeight(const ConvolutionSpec& spec, const PatchMap& map)
      : batch_(spec.batch),
        channels_(spec.out_channels),
        input_size_(map.num_sources() * channels_),
        output_size_(map.num_targets() * channels_),
        pairs_(static_cast<size_t>(map.kernel_size())),
        shares_(
            threads::multiplications(batch_ * output_size_ * map.kernel_size()),
            ceil_div(channels_, kBlock)) {
    for (int64_t target = 0; target < map.num_targets(); ++target) {
      const int32_t* sources = map.sources(target);
      for (size_t k = 0; k < pairs_.size(); ++k) {
        if (sources[k] < 0) continue;
        pairs_[k].push_back({target * channels_, sources[k] * channels_});
      }
    }
  }

  size_t workspace_bytes() const override { return 0; }

  void run(const ConvolutionTensors& tensors, void* /*workspace*/) override {
    shares_.run([&](int64_t /*share*/, threads::Range blocks) {
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        run_block(tensors, i * kBlock);
      }
    });
  }

 private:
  using Sums = std::array<Vec, static_cast<size_t>(kVectors)>;

  void run_block(const ConvolutionTensors& tensors, int64_t first) const {
    const int64_t count = std::min(kBlock, channels_ - first);
    const auto kernel = static_cast<int64_t>(pairs_.size());
    float* out = tensors.weight + first * kernel;
    for (int64_t k = 0; k < kernel; ++k) {
      const Sums sums = count == kBlock
                            ? sum_up<true>(tensors, k, first, count)
                            : sum_up<false>(tensors, k, first, count);
      alignas(64) std::array<float, static_cast<size_t>(kBlock)> values;
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[static_cast<size_t>(v)].store(values.data() + v * kLanes);
      }
      for (int64_t c = 0; c < count; ++c) {
        out[c * kernel + k] = values[static_cast<size_t>(c)];
      }
    }
  }

  // Returns the gradient of element k of the kernels of some channels.
  template <bool kWhole>
  Sums sum_up(const ConvolutionTensors& tensors, int64_t k, int64_t first,
              int64_t count) const {
    const std::vector<Pair>& pairs = pairs_[static_cast<size_t>(k)];
    Sums sums;
    sums.fill(Vec(0.0F));
    for (int64_t i = 0; i < batch_; ++i) {
      const float* input = tensors.input + i * input_size_ + first;
      const float* output = tensors.output + i * output_size_ + first;
      for (size_t begin = 0; begin < pairs.size(); begin += kMaxTerms) {
        const size_t end = std::min(begin + kMaxTerms, pairs.size());
        Sums part;
        part.fill(Vec(0.0F));
        for (size_t p = begin; p < end; ++p) {
          add<kWhole>(output + pairs[p].output, input + pairs[p].input, count,
                      part);
        }
        for (size_t v = 0; v < sums.size(); ++v) sums[v] = sums[v] + part[v];
      }
    }
    return sums;
  }

  template <bool kWhole>
  static void add(const float* a, const float* b, int64_t count, Sums& sums) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t rest = count - v * kLanes;
      if (!kWhole && rest <= 0) return;
      Vec& sum = sums[static_cast<size_t>(v)];
      const int64_t at = v * kLanes;
      if (kWhole || rest >= kLanes) {
        sum = at::vec::fmadd(Vec::loadu(a + at), Vec::loadu(b + at), sum);
      } else {
        sum = at::vec::fmadd(Vec::loadu(a + at, rest), Vec::loadu(b + at, rest),
                             sum);
      }
    }
  }

  int64_t batch_;
  int64_t channels_;
  int64_t input_size_;                    // of an image
  int64_t output_size_;                   // the same
  std::vector<std::vector<Pair>> pairs_;  // by element of the kernel
  threads::Shares shares_;
};

// Whether the channels of each position are adjacent.
bool are_rows(const PatchMap& map, const ConvolutionSpec& spec) {
  return (spec.input_order == Order::kChannelsLast || map.num_sources() == 1) &&
         (spec.output_order == Order::kChannelsLast || map.num_targets() == 1);
}

}  // namespace

bool moves_channels_last(const ConvolutionSpec& spec, ConvolutionPass pass) {
  int64_t positions = 1;
  for (const int64_t size : spec.input_size) positions *= size;
  return pass == ConvolutionPass::kGradWeight && spec.groups > 1 &&
         spec.groups == spec.in_channels && spec.groups == spec.out_channels &&
         positions <= kMaxPositions;
}

std::unique_ptr<dense::Convolution> create_depthwise_grad_weight(
    const ConvolutionSpec& spec, ConvolutionPass pass) {
  if (!moves_channels_last(spec, pass)) return nullptr;
  const PatchMap map = PatchMap::forward(spec);
  if (!are_rows(map, spec)) return nullptr;
  return std::make_unique<DepthwiseGradWeight>(spec, map);
}

}  // namespace popsim::ops
