// Puts an element, which consists of some tensors, into a queue that the host
// reads, each time it runs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "ops/op_def.h"
#include "ops/operands/aten_types.h"
#include "ops/work.h"

namespace popsim::ops {
namespace {

class EnqueueKernel final : public Kernel {
 public:
  explicit EnqueueKernel(const OpView& op)
      : queue_(op.attribute<int64_t>("queue")) {
    const auto& dtypes = op.attribute<std::vector<std::string>>("dtypes");
    for (size_t i = 0; i < op.num_inputs(); ++i) {
      const graph::Tensor& x = op.input(i);
      const DType dtype = dtype_from_name(dtypes[i]);
      parts_.push_back({op.input_id(i), x.shape, to_scalar_type(dtype),
                        static_cast<size_t>(x.numel() * size_in_bytes(dtype)),
                        x.contiguous() && x.dtype == dtype});
    }
  }

  std::vector<graph::TensorId> at_tensors() const override {
    std::vector<graph::TensorId> ids;
    for (const Part& part : parts_) {
      if (!part.plain_copy) ids.push_back(part.source);
    }
    return ids;
  }

  void run(const RunContext& context) override {
    Outlet& outlet = context.outlet(queue_);
    const std::span<void* const> places =
        outlet.begin_element(*context.patience);
    if (places.empty()) return;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      if (part.plain_copy) {
        std::memcpy(places[i], context.data(part.source), part.bytes);
      } else {
        at::from_blob(places[i], part.shape, part.dtype)
            .copy_(context.tensor(part.source));
      }
    }
    outlet.end_element();
  }

 private:
  struct Part {
    graph::TensorId source;
    Shape shape;
    at::ScalarType dtype;  // dtype in the queue
    size_t bytes;          // bytes in the queue
    bool plain_copy;
  };

  int64_t queue_;
  std::vector<Part> parts_;
};

std::vector<TensorType> enqueue_types(const OpCall& op) {
  op.require(op.op().phase != graph::Phase::kSetup,
             "the op runs in every run, not in the setup phase");
  op.require(op.attribute<std::vector<std::string>>("dtypes").size() ==
                 op.num_inputs(),
             "each tensor has a dtype in the queue");
  return {};
}

std::vector<graph::Work> enqueue_work(const OpView& op) {
  int64_t bytes = 0;
  for (size_t i = 0; i < op.num_inputs(); ++i) bytes += op.input(i).bytes();
  return {graph::Host{bytes}};
}

}  // namespace

extern const OpDef kEnqueue{
    .name = "enqueue",
    .schema = "enqueue(Tensor[] x, *, int{0..} queue, dtype[] dtypes) -> ()",
    .family = "host",
    .shape = enqueue_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<EnqueueKernel>(op);
    },
    .work = enqueue_work,
};

}  // namespace popsim::ops
