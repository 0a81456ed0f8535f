// Whether this build computes convolutions with oneDNN.
//
// Only csrc/dense uses oneDNN. In a build without oneDNN, create_convolution()
// returns null, as it does for a problem that oneDNN has no fast code for; the
// ops then compute with ATen.
#pragma once

#include <string>

namespace popsim::dense {

[[nodiscard]] bool available();
// The library's version, such as "3.2.0"; empty in a build without oneDNN.
[[nodiscard]] std::string version();

}  // namespace popsim::dense
