// Computes the pieces of a convolution. Other folders must not include this
// header.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "dense/onednn.h"
#include "dense/onednn_convolution.h"
#include "dense/problem/convolution.h"

namespace popsim::dense {

// Runs the pieces of one shape, one at a time, on one thread.
class PieceRunner {
 public:
  // `input` and `output` are the strides of the whole tensors.
  PieceRunner(const ConvolutionSpec& spec, ConvolutionPass pass,
              const Described& described, const dnnl::memory::dims& input,
              const dnnl::memory::dims& output);

  [[nodiscard]] size_t workspace_bytes() const { return plan_.bytes(); }

  // `tensors` must point to the first element of the piece; the weight must
  // have the layout of `described`.
  void run(const ConvolutionTensors& tensors, char* workspace);

 private:
  // A tensor in the caller's memory, and in the layout that the primitive
  // needs.
  struct Operand {
    dnnl::memory plain;
    // The same object as `plain` if the layouts are the same.
    dnnl::memory blocked;
    std::optional<size_t> offset;  // of `blocked` in the workspace
  };

  Operand make_operand(const dnnl::memory::dims& sizes,
                       const dnnl::memory::dims& strides,
                       const dnnl::memory::desc& wanted);
  static void bind(Operand& operand, float* tensor, char* workspace);
  void add_steps(ConvolutionPass pass, const Described& described);
  void add_convolution(const Described& described, int input, int weight,
                       int output);
  void add_reorder(const dnnl::memory& from, const dnnl::memory& to);
  dnnl::memory scratchpad(const dnnl::memory::desc& desc);

  Operand input_;
  Operand output_;
  dnnl::memory weight_;
  std::optional<dnnl::memory> bias_;
  // All scratchpads share one place, because only one step runs at a time.
  std::vector<dnnl::memory> scratchpads_;
  size_t scratchpad_bytes_ = 0;
  size_t scratchpad_offset_ = 0;
  WorkspacePlan plan_;
  std::vector<Step> steps_;
  dnnl::stream stream_;
};

// A weight in the caller's memory and in the layout of the pieces, or some
// output channels of such a weight.
class WeightOperand {
 public:
  WeightOperand(const dnnl::memory::dims& sizes,
                const dnnl::memory::desc& wanted);

  // Whether the two layouts differ.
  [[nodiscard]] bool differs() const;
  // The size in the layout of the pieces.
  [[nodiscard]] size_t bytes() const { return blocked_.get_desc().get_size(); }

  // Plan one of the two copies; run() then makes it. If the layouts are the
  // same, nothing is copied.
  void plan_to_blocked(WorkspacePlan& plan) { add(plain_, blocked_, plan); }
  void plan_to_plain(WorkspacePlan& plan) { add(blocked_, plain_, plan); }
  void run(float* plain, float* blocked, char* workspace);

 private:
  void add(const dnnl::memory& from, const dnnl::memory& to,
           WorkspacePlan& plan);

  dnnl::memory plain_;
  dnnl::memory blocked_;
  dnnl::memory scratchpad_;
  size_t scratchpad_offset_ = 0;
  std::optional<Step> step_;
  dnnl::stream stream_;
};

}  // namespace popsim::dense
