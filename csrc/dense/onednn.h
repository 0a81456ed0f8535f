// What the files of this folder share about oneDNN. Not for other folders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>
#include <vector>

namespace popsim::dense {

// The processor. Made once, kept to the end of the process.
[[nodiscard]] const dnnl::engine& cpu();

[[nodiscard]] dnnl::memory::dims contiguous_strides(
    const dnnl::memory::dims& sizes);
[[nodiscard]] dnnl::memory::desc plain_desc(const dnnl::memory::dims& sizes,
                                            const dnnl::memory::dims& strides);
// A memory object without memory, to be pointed at some for each run.
[[nodiscard]] dnnl::memory unbound(const dnnl::memory::desc& desc);
// Attributes that make a primitive ask for its scratchpad.
[[nodiscard]] dnnl::primitive_attr user_scratchpad();
// oneDNN's reference code is for testing: thousands of times slower.
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
  // What a buffer takes up.
  [[nodiscard]] static size_t space(size_t bytes) {
    return (bytes + 63) / 64 * 64;
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// A primitive together with its arguments. Executing it allocates nothing of
// ours: oneDNN's C++ interface would copy the arguments each time.
class Step {
 public:
  Step(dnnl::primitive primitive,
       const std::vector<std::pair<int, dnnl::memory>>& arguments);

  // Throws InternalError when oneDNN fails.
  void execute(const dnnl::stream& stream) const;

 private:
  dnnl::primitive primitive_;
  std::vector<dnnl::memory> memories_;  // owners of what arguments_ points to
  std::vector<dnnl_exec_arg_t> arguments_;
};

}  // namespace popsim::dense
