#include "bindings/host_watch.h"

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace py = pybind11;

namespace popsim::bindings {
namespace {

using Marks = std::vector<std::uintptr_t>;

// The marks as bytes, to compare them with the marks of a later time. The bytes
// own no object: an identity identifies an object only while Python keeps the
// object alive.
py::bytes as_bytes(const Marks& marks) {
  return {reinterpret_cast<const char*>(marks.data()),
          marks.size() * sizeof(Marks::value_type)};
}

std::uintptr_t identity(const void* object) {
  return reinterpret_cast<std::uintptr_t>(object);
}

// (torch's own check calls Python code of the metaclass for parameter classes)
bool is_tensor(PyObject* object) {
  auto* kind = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  return PyObject_TypeCheck(object, kind) != 0;
}

constexpr size_t kSamples = 3;

// Adds some numbers of a tensor: changes through Tensor.data have no count. An
// initialisation or a factor changes most numbers, so a few show it.
void add_samples(const at::Tensor& tensor, const void* data, Marks& marks) {
  const auto* memory = static_cast<const std::byte*>(data);
  const auto bytes = static_cast<size_t>(tensor.numel()) * tensor.itemsize();
  std::array<Marks::value_type, kSamples> samples{};
  constexpr size_t kSize = sizeof(Marks::value_type);
  // (a storage may have become smaller than its tensors)
  const bool readable =
      memory != nullptr && tensor.is_cpu() && tensor.is_contiguous() &&
      tensor.storage().nbytes() >=
          bytes +
              static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  if (readable && bytes >= kSize) {
    std::memcpy(&samples[0], memory, kSize);
    std::memcpy(&samples[1], memory + bytes / 2 / kSize * kSize, kSize);
    std::memcpy(&samples[2], memory + bytes - kSize, kSize);
  } else if (readable) {
    std::memcpy(&samples[0], memory, bytes);
  }
  marks.insert(marks.end(), samples.begin(), samples.end());
}

// Marks that change when a tensor gets other memory or other values. Without
// samples they do not show changes through Tensor.data.
py::bytes tensor_marks(const py::list& tensors, bool samples) {
  Marks marks;
  marks.reserve((2 + kSamples) * tensors.size());
  for (const py::handle object : tensors) {
    if (!is_tensor(object.ptr())) {
      throw py::type_error("tensor_marks: an object is not a tensor.");
    }
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    const int64_t version = tensor.is_inference() ? 0 : tensor._version();
    marks.push_back(static_cast<std::uintptr_t>(version));
    const void* data = tensor.const_data_ptr();
    marks.push_back(identity(data));
    if (samples) add_samples(tensor, data, marks);
  }
  return as_bytes(marks);
}

// (a dictionary lookup is fastest when the key is the same string object)
py::object interned(const char* name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
}

// Appends the contents of a module's dictionary of layers or parameters, and
// which of them require a gradient.
void add_held(PyObject* held, Marks& marks) {
  marks.push_back(identity(held));
  if (held == nullptr || !PyDict_Check(held)) return;
  marks.push_back(static_cast<std::uintptr_t>(PyDict_Size(held)));
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(held, &at, nullptr, &value);) {
    marks.push_back(identity(value));
    if (is_tensor(value)) {
      marks.push_back(THPVariable_Unpack(value).requires_grad() ? 1 : 0);
    }
  }
}

// Marks that change when a module changes its mode, its layers, its parameters,
// or which of these require a gradient. Takes the modules' own dictionaries and
// runs no code of the modules.
py::bytes module_marks(const py::list& modules) {
  const py::object mode = interned("training");
  const py::object layers = interned("_modules");
  const py::object parameters = interned("_parameters");
  Marks marks;
  marks.reserve(12 * modules.size());
  for (const py::handle own : modules) {
    if (!PyDict_Check(own.ptr())) {
      throw py::type_error("module_marks: an object is not a dictionary.");
    }
    const auto item = [&](const py::object& name) {
      return PyDict_GetItemWithError(own.ptr(), name.ptr());
    };
    marks.push_back(identity(item(mode)));
    add_held(item(layers), marks);
    add_held(item(parameters), marks);
  }
  return as_bytes(marks);
}

}  // namespace

void bind_host_watch(py::module_& m) {
  m.def("tensor_marks", &tensor_marks, py::arg("tensors"),
        py::arg("samples") = false);
  m.def("module_marks", &module_marks, py::arg("modules"));
}

}  // namespace popsim::bindings
