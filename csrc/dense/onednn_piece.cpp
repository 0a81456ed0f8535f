#if defined(POPSIM_HAVE_ONEDNN)
#include "dense/onednn_piece.h"

#include <algorithm>
#include <utility>

namespace popsim::dense {
namespace {

using dnnl::memory;
using Dims = memory::dims;

dnnl::reorder::primitive_desc reorder_desc(const memory& from,
                                           const memory& to) {
  return {cpu(), from.get_desc(), cpu(), to.get_desc(), user_scratchpad()};
}

Step reorder_step(const dnnl::reorder::primitive_desc& desc, const memory& from,
                  const memory& to, const memory& scratchpad) {
  return {dnnl::reorder(desc),
          {{DNNL_ARG_FROM, from},
           {DNNL_ARG_TO, to},
           {DNNL_ARG_SCRATCHPAD, scratchpad}}};
}

}  // namespace

PieceRunner::PieceRunner(const ConvolutionSpec& spec, ConvolutionPass pass,
                         const Described& described, const Dims& input,
                         const Dims& output)
    : stream_(cpu()) {
  const ConvolutionSizes sizes = sizes_of(spec);
  input_ = make_operand(sizes.input, input, described.input);
  output_ = make_operand(sizes.output, output, described.output);
  weight_ = unbound(described.weight);
  if (!described.bias.is_zero()) bias_ = unbound(described.bias);
  add_steps(pass, described);
  scratchpad_offset_ = plan_.add(scratchpad_bytes_);
}

void PieceRunner::run(const ConvolutionTensors& tensors, char* workspace) {
  bind(input_, tensors.input, workspace);
  bind(output_, tensors.output, workspace);
  weight_.set_data_handle(tensors.weight);
  if (bias_) bias_->set_data_handle(tensors.bias);
  for (memory& scratchpad : scratchpads_) {
    scratchpad.set_data_handle(workspace + scratchpad_offset_);
  }
  for (const Step& step : steps_) step.execute(stream_);
}

PieceRunner::Operand PieceRunner::make_operand(const Dims& sizes,
                                               const Dims& strides,
                                               const memory::desc& wanted) {
  const memory::desc desc = plain_desc(sizes, strides);
  Operand operand{unbound(desc), {}, std::nullopt};
  if (desc == wanted) {
    operand.blocked = operand.plain;
  } else {
    operand.blocked = unbound(wanted);
    operand.offset = plan_.add(wanted.get_size());
  }
  return operand;
}

void PieceRunner::bind(Operand& operand, float* tensor, char* workspace) {
  operand.plain.set_data_handle(tensor);
  if (operand.offset) {
    operand.blocked.set_data_handle(workspace + *operand.offset);
  }
}

void PieceRunner::add_steps(ConvolutionPass pass, const Described& described) {
  switch (pass) {
    case ConvolutionPass::kForward:
      add_reorder(input_.plain, input_.blocked);
      add_convolution(described, DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST);
      add_reorder(output_.blocked, output_.plain);
      return;
    case ConvolutionPass::kGradInput:
      add_reorder(output_.plain, output_.blocked);
      add_convolution(described, DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS,
                      DNNL_ARG_DIFF_DST);
      add_reorder(input_.blocked, input_.plain);
      return;
    case ConvolutionPass::kGradWeight:
      add_reorder(output_.plain, output_.blocked);
      add_reorder(input_.plain, input_.blocked);
      add_convolution(described, DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS,
                      DNNL_ARG_DIFF_DST);
      return;
  }
}

void PieceRunner::add_convolution(const Described& described, int input,
                                  int weight, int output) {
  std::vector<std::pair<int, memory>> arguments{
      {input, input_.blocked},
      {weight, weight_},
      {output, output_.blocked},
      {DNNL_ARG_SCRATCHPAD, scratchpad(described.scratchpad)}};
  if (bias_) arguments.emplace_back(DNNL_ARG_BIAS, *bias_);
  steps_.emplace_back(described.primitive, arguments);
}

void PieceRunner::add_reorder(const memory& from, const memory& to) {
  if (from == to) return;
  const auto desc = reorder_desc(from, to);
  steps_.push_back(
      reorder_step(desc, from, to, scratchpad(desc.scratchpad_desc())));
}

memory PieceRunner::scratchpad(const memory::desc& desc) {
  scratchpad_bytes_ = std::max(scratchpad_bytes_, desc.get_size());
  scratchpads_.push_back(unbound(desc));
  return scratchpads_.back();
}

WeightOperand::WeightOperand(const Dims& sizes, const memory::desc& wanted)
    : plain_(unbound(plain_desc(sizes, contiguous_strides(sizes)))),
      blocked_(unbound(wanted)),
      stream_(cpu()) {}

bool WeightOperand::differs() const {
  return plain_.get_desc() != blocked_.get_desc();
}

void WeightOperand::run(float* plain, float* blocked, char* workspace) {
  if (!step_) return;
  plain_.set_data_handle(plain);
  blocked_.set_data_handle(blocked);
  scratchpad_.set_data_handle(workspace + scratchpad_offset_);
  step_->execute(stream_);
}

void WeightOperand::add(const memory& from, const memory& to,
                        WorkspacePlan& plan) {
  if (!differs()) return;
  const auto desc = reorder_desc(from, to);
  scratchpad_ = unbound(desc.scratchpad_desc());
  scratchpad_offset_ = plan.add(desc.scratchpad_desc().get_size());
  step_.emplace(reorder_step(desc, from, to, scratchpad_));
}

}  // namespace popsim::dense
#endif
