// Gives PyTorch's `ipu` device type what tracing needs: one device, `ipu:0`,
// for fake tensors. Nothing is ever allocated on this device.
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

// Without this fallback, operators that have no autograd kernel of their own
// (custom operators) would fail under this key.
TORCH_LIBRARY_IMPL(_, AutogradIPU, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
