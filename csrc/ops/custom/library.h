// The users' operators: those of the libraries that the process has loaded, and
// those that Python registers, in the same form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#define POPSIM_CUSTOM_OP_ONLY_C
#include <popsim_custom_op.h>

namespace popsim::ops::custom {

// Looks for operators in libraries that were loaded since the last call: on
// Linux in all libraries, elsewhere in these files. If several operators have
// the same name, the one found last counts; programs keep the operator they
// were compiled with. Returns the problems of libraries that are left out, as
// sentences.
std::vector<std::string> look_for_libraries(
    const std::vector<std::string>& files);

// Adds an operator that lives as long as the process. Throws UserError if the
// operator is incomplete.
void add(const popsim_custom_op* op);

// Returns nullptr if there is none. Does not look for new libraries.
[[nodiscard]] const popsim_custom_op* find(std::string_view domain,
                                           std::string_view name,
                                           int64_t version);

// All operators that find() can find, by domain, name and version.
[[nodiscard]] std::vector<const popsim_custom_op*> all();

}  // namespace popsim::ops::custom
