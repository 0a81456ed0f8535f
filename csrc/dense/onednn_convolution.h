// oneDNN's convolutions, each on one thread. Other folders must not include
// this header.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dense/convolution_pieces.h"
#include "dense/onednn.h"
#include "dense/problem/convolution.h"

namespace popsim::dense {

// The layouts that a primitive uses.
enum class Layout : int8_t {
  kBlocked,       // oneDNN's choice: fast code with a reorder at each edge
  kChannelsLast,  // as fast, without reorders if the tensors have this layout
  kPlain,         // a matrix product per image, on channels-first tensors
};

struct ConvolutionSizes {
  dnnl::memory::dims input;
  dnnl::memory::dims weight;
  dnnl::memory::dims bias;
  dnnl::memory::dims output;
};

[[nodiscard]] ConvolutionSizes sizes_of(const ConvolutionSpec& spec);
[[nodiscard]] dnnl::memory::dims strides_in(Order order,
                                            const dnnl::memory::dims& sizes);

// The layouts to try, the faster one first.
[[nodiscard]] std::vector<Layout> layouts_for(const ConvolutionSpec& spec,
                                              ConvolutionPass pass);

// The descriptor of one pass, in a common form for all passes.
struct Described {
  dnnl::primitive primitive;
  dnnl::memory::desc input;
  dnnl::memory::desc weight;
  dnnl::memory::desc bias;  // empty if the pass has none
  dnnl::memory::desc output;
  dnnl::memory::desc scratchpad;
};

// `weight`: the layout that the weight must have; empty: any layout. Returns
// nothing if there is no fast code. Call it, and run the primitive, with a
// budget of one thread: oneDNN plans for the current number of threads.
[[nodiscard]] std::optional<Described> describe(
    const PieceShape& shape, Layout layout, ConvolutionPass pass,
    const dnnl::memory::desc& weight);

}  // namespace popsim::dense
