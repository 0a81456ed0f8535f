// Checks whether a call's arguments can go to the device as they are.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace popsim::bindings {

// Whether a contiguous tensor has no int64 value outside of the range of int32.
[[nodiscard]] bool fits_32_bits(const at::Tensor& tensor);

// The types and shapes that a call's tensors had when the program was compiled.
// It serves calls whose arguments are all positional tensors. One call from
// Python checks all of them; Python explains or converts arguments that do not
// fit.
class PlainArguments {
 public:
  using Kind = std::pair<at::ScalarType, std::vector<int64_t>>;

  explicit PlainArguments(std::vector<Kind> kinds) : kinds_(std::move(kinds)) {}

  // Whether the number of arguments is right, and each is a torch.Tensor (not
  // of a subclass) of the right type and shape, whose values the device has
  // and can read in place.
  [[nodiscard]] bool fit(const pybind11::tuple& arguments) const;

 private:
  std::vector<Kind> kinds_;
};

void bind_plain_arguments(pybind11::module_& m);

}  // namespace popsim::bindings
