// Convolutions and their gradients in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace popsim::dense {

// Per spatial axis, one to three of them.
using Extents = std::vector<int64_t>;

// The order of a tensor's axes in memory, outermost first. No gaps.
enum class Order : int8_t {
  kChannelsFirst,  // batch, channels, spatial axes
  kChannelsLast,   // batch, spatial axes, channels
};

struct ConvolutionSpec {
  int64_t batch = 0;
  int64_t in_channels = 0;
  int64_t out_channels = 0;
  int64_t groups = 1;
  Extents input_size;
  Extents kernel_size;
  Extents output_size;
  Extents stride;
  Extents padding;    // on both ends
  Extents dilation;   // 1: neighbours
  bool bias = false;  // forward: added
  // Bits of each number that is read: fewer if widened from 16 bits.
  int significant_bits = 24;
  Order input_order = Order::kChannelsFirst;
  Order output_order = Order::kChannelsFirst;

  bool operator==(const ConvolutionSpec&) const = default;
};

enum class ConvolutionPass : int8_t { kForward, kGradInput, kGradWeight };

// Tensors in the orders of the spec; the weight is contiguous. What the pass
// computes is written, the rest is read:
//   kForward     input, weight, bias -> output
//   kGradInput   weight, output (its gradient) -> input (its gradient)
//   kGradWeight  input, output (its gradient) -> weight (its gradient)
struct ConvolutionTensors {
  float* input = nullptr;   // [batch, in_channels, input_size...]
  float* weight = nullptr;  // [out_channels, in_channels / groups,
                            //  kernel_size...]
  float* bias = nullptr;    // [out_channels]
  float* output = nullptr;  // [batch, out_channels, output_size...]
};

// Code for one problem; `dense/convolution.h` chooses it.
class Convolution {
 public:
  Convolution() = default;
  Convolution(const Convolution&) = delete;
  Convolution& operator=(const Convolution&) = delete;
  virtual ~Convolution() = default;

  // Memory that run() needs besides the tensors: the operands in the layouts
  // that it computes with.
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // `workspace` is aligned to 64 bytes.
  virtual void run(const ConvolutionTensors& tensors, void* workspace) = 0;
};

}  // namespace popsim::dense
