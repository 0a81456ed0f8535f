#include "ops/work.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace popsim::ops {
namespace {

// Repeated elements (with stride 0) count once.
int64_t bytes_of(const graph::Tensor& tensor) {
  int64_t bytes = size_in_bytes(tensor.dtype);
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.strides[i] != 0) bytes *= tensor.shape[i];
  }
  return bytes;
}

int64_t bytes_moved(const OpView& op) {
  int64_t bytes = 0;
  std::vector<graph::TensorId> read = op.op().inputs;
  std::ranges::sort(read);
  read.erase(std::ranges::unique(read).begin(), read.end());
  for (const auto* ids : {&std::as_const(read), &op.op().outputs}) {
    for (const graph::TensorId id : *ids) {
      if (id != graph::kNoTensor) bytes += bytes_of(op.graph().tensor(id));
    }
  }
  return bytes;
}

}  // namespace

std::vector<graph::Work> work_of(const OpView& op) {
  std::vector<graph::Work> work = find_op(op.op().kind).work(op);
  const bool says_bytes = std::ranges::any_of(
      work, [](const graph::Work& part) { return graph::bytes(part) > 0; });
  if (!says_bytes) work.emplace_back(graph::Move{bytes_moved(op)});
  return work;
}

std::vector<graph::Work> no_arithmetic(const OpView& /*op*/) { return {}; }

}  // namespace popsim::ops
