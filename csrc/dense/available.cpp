#include "dense/available.h"

#if defined(POPSIM_HAVE_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#endif

namespace popsim::dense {

bool available() {
#if defined(POPSIM_HAVE_ONEDNN)
  // The headers and the library must be of the same oneDNN version.
  const dnnl_version_t* library = dnnl_version();
  return library->major == DNNL_VERSION_MAJOR &&
         library->minor == DNNL_VERSION_MINOR;
#else
  return false;
#endif
}

std::string version() {
#if defined(POPSIM_HAVE_ONEDNN)
  const dnnl_version_t* library = dnnl_version();
  return std::to_string(library->major) + "." + std::to_string(library->minor) +
         "." + std::to_string(library->patch);
#else
  return {};
#endif
}

}  // namespace popsim::dense
