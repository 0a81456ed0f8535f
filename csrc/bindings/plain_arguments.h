// Whether a call's arguments can go to the device as they are.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace popsim::bindings {

// What the tensors of a call were like when the program was compiled, for the
// calls that have nothing but tensors, all in their places. This looks at each
// of them once, in one call from Python; what does not fit is for Python to
// explain or to convert.
class PlainArguments {
 public:
  using Kind = std::pair<at::ScalarType, std::vector<int64_t>>;

  explicit PlainArguments(std::vector<Kind> kinds) : kinds_(std::move(kinds)) {}

  // Whether there are just as many, and each is a torch.Tensor, not of a class
  // of its own, of its type and shape, whose numbers the device can read where
  // they are.
  [[nodiscard]] bool fit(const pybind11::tuple& arguments) const;

 private:
  std::vector<Kind> kinds_;
};

void bind_plain_arguments(pybind11::module_& m);

}  // namespace popsim::bindings
