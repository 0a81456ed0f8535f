// Gives PyTorch's `ipu` device type what tracing needs: one device, `ipu:0`,
// that fake tensors can live on. Nothing real is ever allocated there.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace popsim::bindings {
namespace {

struct IpuGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::IPU> {
  c10::Device getDevice() const override { return {c10::DeviceType::IPU, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(IPU, IpuGuard);

}  // namespace
}  // namespace popsim::bindings

// Operators without an autograd kernel of their own (custom ones) would fail
// under this key.
TORCH_LIBRARY_IMPL(_, AutogradIPU, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
