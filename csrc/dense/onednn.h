// Helpers for oneDNN that the files of this folder share. Other folders must
// not include this header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

namespace popsim::dense {

// The CPU engine. It is created once and kept until the process ends.
[[nodiscard]] const dnnl::engine& cpu();

[[nodiscard]] dnnl::memory::dims contiguous_strides(
    const dnnl::memory::dims& sizes);
[[nodiscard]] dnnl::memory::desc plain_desc(const dnnl::memory::dims& sizes,
                                            const dnnl::memory::dims& strides);
// A memory object without memory; each run sets its address.
[[nodiscard]] dnnl::memory unbound(const dnnl::memory::desc& desc);
// Attributes that make the caller provide a primitive's scratchpad.
[[nodiscard]] dnnl::primitive_attr user_scratchpad();
// Whether this is not oneDNN's reference code, which is for tests and thousands
// of times slower.
[[nodiscard]] bool is_fast(const dnnl::primitive_desc_base& desc);

// Places buffers one after the other in a workspace.
class WorkspacePlan {
 public:
  // Returns the offset of the new buffer, a multiple of 64 bytes.
  size_t add(size_t bytes) {
    const size_t offset = bytes_;
    bytes_ += space(bytes);
    return offset;
  }
  // The space that a buffer takes.
  [[nodiscard]] static size_t space(size_t bytes) {
    return (bytes + 63) / 64 * 64;
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// A primitive together with its arguments. Executing it allocates no memory:
// oneDNN's C++ interface would copy the arguments each time.
class Step {
 public:
  Step(dnnl::primitive primitive,
       const std::vector<std::pair<int, dnnl::memory>>& arguments);

  // Throws InternalError if oneDNN fails.
  void execute(const dnnl::stream& stream) const;

 private:
  dnnl::primitive primitive_;
  std::vector<dnnl::memory> memories_;  // they own what arguments_ points to
  std::vector<dnnl_exec_arg_t> arguments_;
};

}  // namespace popsim::dense
