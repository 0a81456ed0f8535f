#include "ops/custom/library.h"

#include <dlfcn.h>

#if defined(__linux__)
#include <link.h>
#endif

#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "base/check.h"

namespace popsim::ops::custom {
namespace {

using Key = std::tuple<std::string, std::string, int64_t>;

// The only global state here that changes while the process runs: the user may
// load libraries at any time.
struct Registry {
  std::mutex mutex;
  std::map<Key, const popsim_custom_op*, std::less<>> ops;
  std::set<std::string> files;  // files that were checked
  std::set<const popsim_custom_library*> libraries;
  std::vector<std::string> problems;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

void insert(Registry& to, const popsim_custom_op* op) {
  check_user(
      op->domain != nullptr && op->name != nullptr && op->kernel != nullptr,
      "an operator has no domain, no name or no kernel");
  to.ops.insert_or_assign(Key(op->domain, op->name, op->version), op);
}

// The files of all loaded libraries, in the order in which they were loaded.
std::vector<std::string> loaded_files() {
  std::vector<std::string> files;
#if defined(__linux__)
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t /*size*/, void* to) {
        if (info->dlpi_name != nullptr && *info->dlpi_name != '\0') {
          static_cast<std::vector<std::string>*>(to)->emplace_back(
              info->dlpi_name);
        }
        return 0;
      },
      &files);
#endif
  return files;
}

void add_library(Registry& to, const std::string& file,
                 const popsim_custom_library& library) {
  if (library.version != POPSIM_CUSTOM_OP_VERSION) {
    to.problems.push_back(
        join(file, " was compiled with version ", library.version,
             " of popsim_custom_op.h, and this package has version ",
             POPSIM_CUSTOM_OP_VERSION,
             ": compile it again with the header of this package."));
    return;
  }
  for (const popsim_custom_op* op = library.ops; op != nullptr; op = op->next) {
    if (op->shapes == nullptr) {
      to.problems.push_back(join(file, " has an operator '",
                                 op->name == nullptr ? "" : op->name,
                                 "' without a shape rule: give it one."));
    } else {
      insert(to, op);
    }
  }
}

void look_into(Registry& to, const std::string& file) {
  if (!to.files.insert(file).second) return;
  void* handle = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) {
    to.files.erase(file);  // the file may be loaded later
    return;
  }
  const auto offered = reinterpret_cast<popsim_custom_ops_function>(
      dlsym(handle, "popsim_custom_ops"));
  const popsim_custom_library* library =
      offered == nullptr ? nullptr : offered();
  // A library may also be found through a library that depends on it.
  if (library == nullptr || !to.libraries.insert(library).second) {
    dlclose(handle);
    return;
  }
  // The handle stays open, because programs may run the kernels at any time.
  add_library(to, file, *library);
}

}  // namespace

std::vector<std::string> look_for_libraries(
    const std::vector<std::string>& files) {
  Registry& to = registry();
  std::vector<std::string> found = loaded_files();
  found.insert(found.end(), files.begin(), files.end());
  const std::lock_guard lock(to.mutex);
  for (const std::string& file : found) look_into(to, file);
  return to.problems;
}

void add(const popsim_custom_op* op) {
  Registry& to = registry();
  const std::lock_guard lock(to.mutex);
  insert(to, op);
}

const popsim_custom_op* find(std::string_view domain, std::string_view name,
                             int64_t version) {
  Registry& in = registry();
  const std::lock_guard lock(in.mutex);
  const auto found =
      in.ops.find(Key(std::string(domain), std::string(name), version));
  return found == in.ops.end() ? nullptr : found->second;
}

std::vector<const popsim_custom_op*> all() {
  Registry& in = registry();
  const std::lock_guard lock(in.mutex);
  std::vector<const popsim_custom_op*> ops;
  for (const auto& [key, op] : in.ops) ops.push_back(op);
  return ops;
}

}  // namespace popsim::ops::custom
