#include "runtime/number_log.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/isnan.h>

#include <algorithm>
#include <utility>

#include "ops/op_def.h"
#include "ops/operands/aten_types.h"

namespace popsim::runtime {

using graph::Op;
using graph::TensorId;

NumberLog::NumberLog(const graph::Graph& graph, int64_t copied)
    : NumberLog(graph, std::make_shared<Shared>(), {}) {
  shared_->copied = copied;
}

NumberLog::NumberLog(const graph::Graph& graph, std::shared_ptr<Shared> shared,
                     std::vector<int64_t> path)
    : graph_(graph), shared_(std::move(shared)), path_(std::move(path)) {
  for (size_t i = 0; i < graph.ops().size(); ++i) {
    const Op& op = graph.ops()[i];
    for (size_t k = 0; k < op.bodies.size(); ++k) {
      std::vector<int64_t> inner = path_;
      inner.push_back(static_cast<int64_t>(i));
      inner.push_back(static_cast<int64_t>(k));
      bodies_[op.bodies[k].get()].reset(
          new NumberLog(*op.bodies[k], shared_, std::move(inner)));
    }
  }
}

at::Tensor NumberLog::value(TensorId id, const ops::RunContext& context) const {
  const graph::Tensor& tensor = graph_.tensor(id);
  return at::from_blob(context.data(id), tensor.shape, tensor.strides,
                       ops::to_scalar_type(tensor.dtype));
}

std::vector<at::Tensor> NumberLog::copies(
    const std::vector<TensorId>& ids, const ops::RunContext& context) const {
  std::vector<at::Tensor> copied;
  for (const TensorId id : ids) {
    copied.push_back(
        id == graph::kNoTensor
            ? at::Tensor()
            : value(id, context).clone(at::MemoryFormat::Contiguous));
  }
  return copied;
}

std::vector<BadTensor> NumberLog::bad_among(
    const std::vector<TensorId>& ids, const ops::RunContext& context) const {
  std::vector<BadTensor> bad;
  for (const TensorId id : ids) {
    if (id == graph::kNoTensor || !is_inexact(graph_.tensor(id).dtype)) {
      continue;
    }
    const at::Tensor numbers = value(id, context);
    if (at::isfinite(numbers).all().item<bool>()) continue;
    bad.push_back({id, at::isnan(numbers).any().item<bool>(),
                   at::isinf(numbers).any().item<bool>()});
  }
  return bad;
}

std::vector<TensorId> NumberLog::read_by(const Op& op,
                                         const ops::RunContext& context) const {
  if (context.cursor.accumulation_step != 0 ||
      !ops::find_op(op.kind).begins_anew) {
    return op.inputs;
  }
  std::vector<TensorId> read;
  for (const TensorId id : op.inputs) {
    const bool is_written =
        id != graph::kNoTensor &&
        std::ranges::any_of(op.outputs, [&](TensorId output) {
          return output != graph::kNoTensor &&
                 graph_.root(output) == graph_.root(id);
        });
    if (!is_written) read.push_back(id);
  }
  return read;
}

void NumberLog::before(const Op& op, const ops::RunContext& context) {
  number_ = shared_->num_begun++;
  if (number_ == shared_->copied) {
    shared_->record.operands = copies(op.inputs, context);
  }
  operands_ = bad_among(read_by(op, context), context);
}

void NumberLog::after(const Op& op, const ops::RunContext& context) {
  if (number_ == shared_->copied) {
    shared_->record.results = copies(op.outputs, context);
  }
  std::vector<BadTensor> results = bad_among(op.outputs, context);
  if (results.empty()) return;
  BadExecution found;
  found.path = path_;
  found.path.push_back(&op - graph_.ops().data());
  found.number = number_;
  found.micro_batch = context.cursor.accumulation_step;
  found.iteration = context.cursor.device_iteration;
  found.replica = context.cursor.replica;
  found.operands = std::move(operands_);
  found.results = std::move(results);
  shared_->record.executions.push_back(std::move(found));
}

}  // namespace popsim::runtime
