// The operators that users bring: those of the libraries that the process has
// loaded, and those that Python registers, in the same form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#define POPSIM_CUSTOM_OP_ONLY_C
#include <popsim_custom_op.h>

namespace popsim::ops::custom {

// Looks for operators in libraries that have been loaded since the last time:
// everywhere on Linux, elsewhere in these files. Of several operators with one
// name the last one found counts; programs keep the one they were compiled
// with. Returns what is wrong with libraries that are left out, as sentences.
std::vector<std::string> look_for_libraries(
    const std::vector<std::string>& files);

// Adds an operator that lives as long as the process. Throws UserError where it
// is not whole.
void add(const popsim_custom_op* op);

// nullptr where there is none. Looks at no libraries.
[[nodiscard]] const popsim_custom_op* find(std::string_view domain,
                                           std::string_view name,
                                           int64_t version);

// Those that find() finds, by domain, name and version.
[[nodiscard]] std::vector<const popsim_custom_op*> all();

}  // namespace popsim::ops::custom
