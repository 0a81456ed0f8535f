#include "bindings/plain_arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <ranges>

namespace py = pybind11;

namespace popsim::bindings {
namespace {

bool is_readable(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() &&
         !tensor.is_nested() && !tensor.requires_grad() && !tensor.is_neg() &&
         !tensor.is_conj() && tensor.is_contiguous();
}

constexpr int64_t kBelow = int64_t{1} << 31;

}  // namespace

bool fits_32_bits(const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kLong || tensor.numel() == 0) return true;
  const auto* values = tensor.const_data_ptr<int64_t>();
  // Without a branch in the loop: the compiler makes vectors of it.
  uint64_t upper = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    upper |= static_cast<uint64_t>(values[i] + kBelow) >> 32;
  }
  return upper == 0;
}

bool PlainArguments::fit(const py::tuple& arguments) const {
  if (arguments.size() != kinds_.size()) return false;
  for (size_t i = 0; i < kinds_.size(); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(arguments.ptr(), i);
    // (torch's own check for the exact class also accepts parameters)
    const auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(argument));
    if (kind != THPVariableClass) return false;
    const at::Tensor& tensor = THPVariable_Unpack(argument);
    const auto& [dtype, shape] = kinds_[i];
    const bool fits = tensor.scalar_type() == dtype && is_readable(tensor) &&
                      std::ranges::equal(tensor.sizes(), shape) &&
                      fits_32_bits(tensor);
    if (!fits) return false;
  }
  return true;
}

void bind_plain_arguments(py::module_& m) {
  py::class_<PlainArguments>(m, "PlainArguments")
      .def(py::init<std::vector<PlainArguments::Kind>>(), py::arg("kinds"))
      .def("fit", &PlainArguments::fit, py::arg("arguments"));
  m.def(
      "fits_32_bits",
      [](const at::Tensor& tensor) {
        return fits_32_bits(tensor.contiguous());
      },
      py::arg("tensor"));
}

}  // namespace popsim::bindings
