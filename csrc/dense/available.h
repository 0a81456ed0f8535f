// Whether this build computes convolutions with oneDNN.
//
// csrc/dense is the only folder that sees oneDNN. In a build without it
// create_convolution() returns null, as it does for a problem that oneDNN has
// no fast code for; the ops then compute with ATen.
#pragma once

#include <string>

namespace popsim::dense {

[[nodiscard]] bool available();
// The library's version, as "3.2.0"; empty in a build without it.
[[nodiscard]] std::string version();

}  // namespace popsim::dense
