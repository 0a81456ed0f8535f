#if defined(POPSIM_HAVE_ONEDNN)
#include "dense/onednn.h"

#include <algorithm>
#include <string_view>

#include "base/check.h"

namespace popsim::dense {

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::memory::dims contiguous_strides(const dnnl::memory::dims& sizes) {
  dnnl::memory::dims strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  return strides;
}

dnnl::memory::desc plain_desc(const dnnl::memory::dims& sizes,
                              const dnnl::memory::dims& strides) {
  return {sizes, dnnl::memory::data_type::f32, strides};
}

dnnl::memory unbound(const dnnl::memory::desc& desc) {
  return {desc, cpu(), DNNL_MEMORY_NONE};
}

dnnl::primitive_attr user_scratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

bool is_fast(const dnnl::primitive_desc_base& desc) {
  return std::string_view(desc.impl_info_str()).find("ref") ==
         std::string_view::npos;
}

Step::Step(dnnl::primitive primitive,
           const std::vector<std::pair<int, dnnl::memory>>& arguments)
    : primitive_(std::move(primitive)) {
  for (const auto& [index, memory] : arguments) {
    memories_.push_back(memory);
    arguments_.push_back({index, memory.get()});
  }
}

void Step::execute(const dnnl::stream& stream) const {
  const dnnl_status_t status = dnnl_primitive_execute(
      primitive_.get(), stream.get(), static_cast<int>(arguments_.size()),
      arguments_.data());
  check_internal(status == dnnl_success, "oneDNN failed with status ", status);
}

}  // namespace popsim::dense
#endif
