// An operator written against PyTorch's own headers.
#include <torch/library.h>

namespace {

at::Tensor scaled(const at::Tensor& x, double factor) { return x.mul(factor); }

}  // namespace

TORCH_LIBRARY(popsim_tests_cpp, library) {
  library.def("scaled(Tensor x, float factor) -> Tensor");
}

TORCH_LIBRARY_IMPL(popsim_tests_cpp, CPU, library) {
  library.impl("scaled", &scaled);
}
