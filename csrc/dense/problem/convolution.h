// Convolutions and their gradients in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace popsim::dense {

// One number for each of one to three spatial axes.
using Extents = std::vector<int64_t>;

// The order of a tensor's axes in memory, the outermost first. There are no
// gaps.
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
  Extents dilation;   // 1: adjacent positions
  bool bias = false;  // forward: added
  // The number of significant bits of each number that must be used: fewer if
  // the number was widened from 16 bits. Numbers that have more are rounded, or
  // used whole where that is as fast.
  int significant_bits = 24;
  Order input_order = Order::kChannelsFirst;
  Order output_order = Order::kChannelsFirst;

  bool operator==(const ConvolutionSpec&) const = default;
};

enum class ConvolutionPass : int8_t { kForward, kGradInput, kGradWeight };

// The tensors have the orders of the spec; the weight is contiguous. The pass
// writes its result and reads the other tensors:
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

  // The bytes of memory that run() needs besides the tensors: for the operands
  // in the layouts that it uses.
  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // `workspace` must be aligned to 64 bytes.
  virtual void run(const ConvolutionTensors& tensors, void* workspace) = 0;
};

}  // namespace popsim::dense
