#include "feeds/spill.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "ops/operands/aten_types.h"

namespace popsim::feeds {
namespace {

// Returns an errno value, or 0.
int reserve(int descriptor, size_t bytes) {
#if defined(__linux__)
  // Reserves the space now: if the disk became full later, writing to the
  // mapped file would end the process.
  return posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
#else
  return ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
#endif
}

// An open file whose name is deleted already.
class NamelessFile {
 public:
  explicit NamelessFile(const std::string& folder) {
    std::string name = folder + "/popsim_torch_queue_XXXXXX";
    descriptor_ = mkostemp(name.data(), O_CLOEXEC);
    check(descriptor_ >= 0 ? 0 : errno, "make a file in", folder);
    static_cast<void>(unlink(name.c_str()));
  }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  ~NamelessFile() {
    if (descriptor_ >= 0) static_cast<void>(close(descriptor_));
  }

  [[nodiscard]] void* map(size_t bytes, const std::string& folder) const {
    check(reserve(descriptor_, bytes), "have room in", folder);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED, descriptor_, 0);
    check(memory != MAP_FAILED ? 0 : errno, "map a file in", folder);
    return memory;
  }

 private:
  static void check(int error, const char* what, const std::string& folder) {
    check_user(
        error == 0, "the outfeed queue cannot ", what, " '", folder,
        "' for elements that do not fit into memory: ", std::strerror(error),
        ". Set the environment variable TMPDIR to another folder, read "
        "the queue while the program runs, or give it more memory (max_bytes)");
  }

  int descriptor_ = -1;
};

}  // namespace

at::Tensor tensor_on_disk(const std::string& folder, const Shape& shape,
                          DType dtype) {
  int64_t bytes = size_in_bytes(dtype);
  for (const int64_t size : shape) bytes *= size;
  // An empty file cannot be mapped.
  const auto mapped = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  void* const memory = NamelessFile(folder).map(mapped, folder);
  return at::from_blob(
      memory, shape,
      [mapped](void* begin) { static_cast<void>(munmap(begin, mapped)); },
      ops::to_scalar_type(dtype));
}

}  // namespace popsim::feeds
