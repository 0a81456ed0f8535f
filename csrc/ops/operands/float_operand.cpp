#include "ops/operands/float_operand.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "ops/operands/image_layout.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr size_t kAlignment = 64;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// The memory may grow but never shrinks.
struct ThreadMemory {
  std::unique_ptr<char, Free> start;
  size_t bytes = 0;
};

void read_all(const FloatGather& gather, int64_t numel, const void* source,
              float* out) {
  const threads::Shares shares(threads::elements(numel), numel);
  shares.run([&](int64_t /*share*/, threads::Range range) {
    gather.read(source, range.begin, range.size(), out + range.begin);
  });
}

std::vector<size_t> all_axes(const Shape& shape) {
  std::vector<size_t> axes(shape.size());
  std::iota(axes.begin(), axes.end(), size_t{0});
  return axes;
}

}  // namespace

size_t Workspace::add(size_t bytes) {
  const size_t offset = bytes_;
  bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

char* Workspace::memory() const {
  thread_local ThreadMemory shared;
  if (shared.bytes < bytes_) {
    shared = {};
    shared.start.reset(
        static_cast<char*>(std::aligned_alloc(kAlignment, bytes_)));
    if (shared.start == nullptr) throw std::bad_alloc();
    shared.bytes = bytes_;
  }
  return shared.start.get();
}

FloatInput::FloatInput(const FloatView& view, const std::vector<size_t>& order,
                       bool keep, Workspace& workspace)
    : id_(view.id), numel_(num_elements(view.shape)), strides_(view.strides) {
  Shape sizes;
  Strides from;
  for (const size_t axis : order) {
    sizes.push_back(view.shape[axis]);
    from.push_back(view.strides[axis]);
  }
  if (keep && view.dtype == DType::kFloat32) return;
  const Strides packed = contiguous_strides(sizes);
  for (size_t i = 0; i < order.size(); ++i) strides_[order[i]] = packed[i];
  if (view.dtype == DType::kFloat32 && is_contiguous(sizes, from)) return;
  gather_.emplace(view.dtype, sizes, from);
  offset_ = workspace.add(static_cast<size_t>(numel_) * sizeof(float));
}

FloatInput::FloatInput(graph::TensorId id, const graph::Tensor& tensor,
                       Workspace& workspace)
    : FloatInput({id, tensor.dtype, tensor.shape, tensor.strides},
                 all_axes(tensor.shape), false, workspace) {}

float* FloatInput::load(const RunContext& context, char* workspace) const {
  if (!gather_) return context.data<float>(id_);
  auto* out = reinterpret_cast<float*>(workspace + offset_);
  read_all(*gather_, numel_, context.data(id_), out);
  return out;
}

FloatBroadcast::FloatBroadcast(const FloatView& view)
    : id_(view.id),
      numel_(num_elements(view.shape)),
      gather_(view.dtype, view.shape, view.strides) {}

void FloatBroadcast::write(const RunContext& context, float* out) const {
  read_all(gather_, numel_, context.data(id_), out);
}

FloatOutput::FloatOutput(graph::TensorId id, const graph::Tensor& tensor,
                         Workspace& workspace)
    : writer_(id, tensor.dtype), numel_(tensor.numel()) {
  check_internal(is_image(tensor), "output '", tensor.name,
                 "' is neither contiguous nor channels last");
  if (writer_.in_place()) return;
  offset_ = workspace.add(static_cast<size_t>(numel_) * sizeof(float));
}

float* FloatOutput::buffer(const RunContext& context, char* workspace) const {
  return writer_.space(context, 0,
                       reinterpret_cast<float*>(workspace + offset_));
}

void FloatOutput::store(const RunContext& context,
                        const char* workspace) const {
  if (writer_.in_place()) return;
  const auto* values = reinterpret_cast<const float*>(workspace + offset_);
  const threads::Shares shares(threads::elements(numel_), numel_);
  shares.run([&](int64_t /*share*/, threads::Range range) {
    writer_.write(context, range.begin, range.size(), values + range.begin);
  });
}

bool computes_in_float32(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

}  // namespace popsim::ops
