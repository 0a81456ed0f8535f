#include "ops/convolution/products.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "dense/matmul.h"
#include "ops/convolution/patch_map.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using dense::ConvolutionPass;
using dense::ConvolutionSpec;
using dense::ConvolutionTensors;
using dense::Order;

constexpr size_t kAlignment = 64;
// The largest number of rows of a product whose patches are single positions.
constexpr int64_t kMaxPoints = 512;

int64_t product_of(const dense::Extents& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{1},
                         std::multiplies<>());
}

bool all_are(const dense::Extents& values, int64_t value) {
  return std::ranges::all_of(values, [&](int64_t v) { return v == value; });
}

// Images in memory, without gaps.
struct Images {
  int64_t channels;
  int64_t positions;
  Order order;

  // Whether the channels of each position are adjacent, as in a row.
  [[nodiscard]] bool are_rows() const {
    return order == Order::kChannelsLast || positions == 1;
  }
  [[nodiscard]] int64_t channel_stride() const {
    return are_rows() ? 1 : positions;
  }
  [[nodiscard]] int64_t position_stride() const {
    return are_rows() ? channels : 1;
  }
  [[nodiscard]] float* image(float* data, int64_t i) const {
    return data + i * channels * positions;
  }
};

class ProductConvolution final : public dense::Convolution {
 public:
  ProductConvolution(const ConvolutionSpec& spec, ConvolutionPass pass)
      : pass_(pass),
        map_(PatchMap::forward(spec)),
        batch_(spec.batch),
        input_{spec.in_channels, map_.num_sources(), spec.input_order},
        output_{spec.out_channels, map_.num_targets(), spec.output_order},
        depth_(spec.in_channels * map_.kernel_size()),
        copies_patches_(!input_.are_rows() || !is_pointwise(spec)),
        copies_rows_(!output_.are_rows()),
        matmul_(dense::create_matmul(product(spec))),
        row_shares_(threads::elements(num_rows() * depth_), num_rows()),
        image_shares_(threads::elements(num_rows() * depth_), batch_) {
    if (pass == ConvolutionPass::kGradInput) plan_steps(spec);
    if (copies_patches_) patches_offset_ = add(num_rows() * depth_);
    if (copies_rows_) rows_offset_ = add(num_rows() * output_.channels);
  }

  // Whether there is code for the product.
  [[nodiscard]] bool exists() const { return matmul_ != nullptr; }

  size_t workspace_bytes() const override {
    return matmul_offset_ + matmul_->workspace_bytes();
  }

  void run(const ConvolutionTensors& tensors, void* workspace) override {
    auto* start = static_cast<char*>(workspace);
    float* patches = copies_patches_
                         ? reinterpret_cast<float*>(start + patches_offset_)
                         : tensors.input;
    float* rows = copies_rows_ ? reinterpret_cast<float*>(start + rows_offset_)
                               : tensors.output;
    if (copies_patches_ && pass_ != ConvolutionPass::kGradInput) {
      gather_patches(tensors.input, patches);
    }
    if (copies_rows_ && pass_ != ConvolutionPass::kForward) {
      move_rows<true>(tensors.output, rows);
    }
    multiply(tensors, patches, rows, start + matmul_offset_);
    if (copies_rows_ && pass_ == ConvolutionPass::kForward) {
      move_rows<false>(tensors.output, rows);
    }
    if (copies_patches_ && pass_ == ConvolutionPass::kGradInput) {
      add_patches(patches, tensors.input);
    }
  }

 private:
  static bool is_pointwise(const ConvolutionSpec& spec) {
    return all_are(spec.kernel_size, 1) && all_are(spec.stride, 1) &&
           all_are(spec.padding, 0);
  }

  // A product of few rows reads some columns of the weight at a time. If all
  // channels of the output were read at once, these columns would be on too
  // many pages of memory.
  void plan_steps(const ConvolutionSpec& spec) {
    constexpr int64_t kMaxRows = 64;
    constexpr int64_t kMaxFloats = 1 << 16;
    constexpr int64_t kMinStep = 64;
    constexpr int64_t kMaxStep = 128;
    step_ = kMaxFloats / depth_ < kMaxStep ? kMinStep : kMaxStep;
    const bool steps = num_rows() > 1 && num_rows() <= kMaxRows &&
                       output_.channels > step_ &&
                       output_.channels % step_ == 0;
    if (!steps) {
      step_ = output_.channels;
      return;
    }
    dense::MatmulSpec part = product(spec);
    part.k = step_;
    matmul_ = dense::create_matmul(part);
    part.beta = 1.0F;
    next_ = dense::create_matmul(part);
  }

  [[nodiscard]] int64_t num_rows() const { return batch_ * output_.positions; }

  size_t add(int64_t floats) {
    const size_t offset = matmul_offset_;
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
    matmul_offset_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }

  [[nodiscard]] dense::MatmulSpec product(const ConvolutionSpec& spec) const {
    const int64_t channels = output_.channels;
    dense::MatmulSpec result{.significant_bits = spec.significant_bits};
    switch (pass_) {
      case ConvolutionPass::kForward:
        result.m = num_rows();
        result.n = channels;
        result.k = depth_;
        result.a = {.row = depth_, .column = 1};
        result.b = {.row = 1, .column = depth_};
        result.bias = spec.bias;
        return result;
      case ConvolutionPass::kGradInput:
        result.m = num_rows();
        result.n = depth_;
        result.k = channels;
        result.a = {.row = channels, .column = 1};
        result.b = {.row = depth_, .column = 1};
        return result;
      case ConvolutionPass::kGradWeight:
        result.m = channels;
        result.n = depth_;
        result.k = num_rows();
        result.a = {.row = 1, .column = channels};
        result.b = {.row = depth_, .column = 1};
        return result;
    }
    throw InternalError("ProductConvolution: not a pass");
  }

  void multiply(const ConvolutionTensors& tensors, float* patches, float* rows,
                void* workspace) {
    switch (pass_) {
      case ConvolutionPass::kForward:
        return matmul_->run(patches, tensors.weight, tensors.bias, rows,
                            workspace);
      case ConvolutionPass::kGradInput:
        matmul_->run(rows, tensors.weight, nullptr, patches, workspace);
        for (int64_t c = step_; c < output_.channels; c += step_) {
          next_->run(rows + c, tensors.weight + c * depth_, nullptr, patches,
                     workspace);
        }
        return;
      case ConvolutionPass::kGradWeight:
        return matmul_->run(rows, patches, nullptr, tensors.weight, workspace);
    }
  }

  // Copies the patch of each row, with zeros outside the image.
  void gather_patches(float* input, float* patches) const {
    const int64_t kernel = map_.kernel_size();
    row_shares_.run([&](int64_t /*share*/, threads::Range rows) {
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        const float* image = input_.image(input, row / output_.positions);
        const int32_t* sources = map_.sources(row % output_.positions);
        for (int64_t k = 0; k < kernel; ++k) {
          const float* from = image + sources[k] * input_.position_stride();
          float* to = patches + row * depth_ + k;
          for (int64_t c = 0; c < input_.channels; ++c) {
            to[c * kernel] =
                sources[k] < 0 ? 0.0F : from[c * input_.channel_stride()];
          }
        }
      }
    });
  }

  // Adds each patch to the image at the positions that it was read from.
  void add_patches(const float* patches, float* input) const {
    const int64_t kernel = map_.kernel_size();
    image_shares_.run([&](int64_t /*share*/, threads::Range images) {
      for (int64_t i = images.begin; i < images.end; ++i) {
        float* image = input_.image(input, i);
        std::fill_n(image, input_.channels * input_.positions, 0.0F);
        for (int64_t target = 0; target < output_.positions; ++target) {
          const int32_t* sources = map_.sources(target);
          const float* patch =
              patches + (i * output_.positions + target) * depth_;
          for (int64_t k = 0; k < kernel; ++k) {
            if (sources[k] < 0) continue;
            float* to = image + sources[k] * input_.position_stride();
            for (int64_t c = 0; c < input_.channels; ++c) {
              to[c * input_.channel_stride()] += patch[c * kernel + k];
            }
          }
        }
      }
    });
  }

  // Copies the output to rows of its channels, or back.
  template <bool kToRows>
  void move_rows(float* output, float* rows) const {
    for (int64_t row = 0; row < num_rows(); ++row) {
      float* channels = rows + row * output_.channels;
      float* values = output_.image(output, row / output_.positions) +
                      row % output_.positions;
      for (int64_t c = 0; c < output_.channels; ++c) {
        if constexpr (kToRows) {
          channels[c] = values[c * output_.positions];
        } else {
          values[c * output_.positions] = channels[c];
        }
      }
    }
  }

  ConvolutionPass pass_;
  PatchMap map_;
  int64_t batch_;
  Images input_;
  Images output_;
  int64_t depth_;  // of a patch
  bool copies_patches_;
  bool copies_rows_;
  std::unique_ptr<dense::Matmul> matmul_;
  // Of the gradient of the input: adds up some channels of the output.
  std::unique_ptr<dense::Matmul> next_;
  int64_t step_ = 0;
  threads::Shares row_shares_;
  threads::Shares image_shares_;
  size_t patches_offset_ = 0;
  size_t rows_offset_ = 0;
  size_t matmul_offset_ = 0;
};

// Whether the products are faster than code in blocks. Their patches take
// memory, as the weight in blocks does; if the weight is not much larger, only
// its gradient gains, which code in blocks adds up in several parts. Measured.
bool pays(const ConvolutionSpec& spec, ConvolutionPass pass) {
  const int64_t rows = spec.batch * product_of(spec.output_size);
  if (all_are(spec.kernel_size, 1)) return rows <= kMaxPoints;
  const int64_t copies = pass == ConvolutionPass::kGradWeight ? 1 : 8;
  return copies * rows <= spec.out_channels;
}

}  // namespace

std::unique_ptr<dense::Convolution> create_product_convolution(
    const ConvolutionSpec& spec, ConvolutionPass pass) {
  if (spec.groups != 1 || spec.significant_bits < 24 || !pays(spec, pass)) {
    return nullptr;
  }
  auto convolution = std::make_unique<ProductConvolution>(spec, pass);
  if (!convolution->exists()) return nullptr;
  return convolution;
}

}  // namespace popsim::ops
