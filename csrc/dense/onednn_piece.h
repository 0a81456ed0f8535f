// What computes the pieces of a convolution. Not for other folders.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "dense/onednn.h"
#include "dense/onednn_convolution.h"
#include "dense/problem/convolution.h"

namespace popsim::dense {

// The pieces of one shape, one at a time, on one thread.
class PieceRunner {
 public:
  // `input` and `output`: strides of the whole tensors.
  PieceRunner(const ConvolutionSpec& spec, ConvolutionPass pass,
              const Described& described, const dnnl::memory::dims& input,
              const dnnl::memory::dims& output);

  [[nodiscard]] size_t workspace_bytes() const { return plan_.bytes(); }

  // `tensors` point at the first element of the piece; the weight has the
  // layout that `described` says.
  void run(const ConvolutionTensors& tensors, char* workspace);

 private:
  // A tensor in the caller's memory, and in the layout that the primitive
  // wants.
  struct Operand {
    dnnl::memory plain;
    dnnl::memory blocked;  // the same object as `plain` where the layouts agree
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
  // All in one place: the steps take turns.
  std::vector<dnnl::memory> scratchpads_;
  size_t scratchpad_bytes_ = 0;
  size_t scratchpad_offset_ = 0;
  WorkspacePlan plan_;
  std::vector<Step> steps_;
  dnnl::stream stream_;
};

// A weight in the caller's memory and in the layout of the pieces, or some
// output channels of one.
class WeightOperand {
 public:
  WeightOperand(const dnnl::memory::dims& sizes,
                const dnnl::memory::desc& wanted);

  // Whether the layouts do.
  [[nodiscard]] bool differs() const;
  // The size in the layout of the pieces.
  [[nodiscard]] size_t bytes() const { return blocked_.get_desc().get_size(); }

  // Plan one of the two copies, then run() makes it. Where the layouts agree
  // there is nothing to copy.
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
