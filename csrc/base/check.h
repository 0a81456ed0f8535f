// Error classes of the C++ side and the checks that throw them.
//
// UserError: the caller passed something that is not supported; Python sees
// popsim_torch.Error. InternalError: a bug of this package.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace popsim {

class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Joins its arguments with operator<< into one string.
template <typename... Parts>
[[nodiscard]] std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
void check_user(bool condition, const Parts&... message) {
  if (!condition) throw UserError(join(message...));
}

template <typename... Parts>
void check_internal(bool condition, const Parts&... message) {
  if (!condition) throw InternalError(join(message...));
}

}  // namespace popsim
