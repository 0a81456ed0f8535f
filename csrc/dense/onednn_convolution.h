// oneDNN's convolutions, each for one thread. Not for other folders.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dense/convolution_pieces.h"
#include "dense/onednn.h"
#include "dense/problem/convolution.h"

namespace popsim::dense {

// What a primitive computes with.
enum class Layout : int8_t {
  kBlocked,       // oneDNN's choice: fast code with a reorder at each edge
  kChannelsLast,  // as fast, and without reorders where the tensors agree
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

// Faster layout first.
[[nodiscard]] std::vector<Layout> layouts_for(const ConvolutionSpec& spec,
                                              ConvolutionPass pass);

// The descriptor of one pass, in the form that all passes share.
struct Described {
  dnnl::primitive primitive;
  dnnl::memory::desc input;
  dnnl::memory::desc weight;
  dnnl::memory::desc bias;  // empty where the pass has none
  dnnl::memory::desc output;
  dnnl::memory::desc scratchpad;
};

// `weight`: the layout that it must have, or empty: any. Nothing where there is
// no fast code. To be called, as the primitive is to be run, under a budget of
// one thread: oneDNN plans for the number that it finds.
[[nodiscard]] std::optional<Described> describe(
    const PieceShape& shape, Layout layout, ConvolutionPass pass,
    const dnnl::memory::desc& weight);

}  // namespace popsim::dense
