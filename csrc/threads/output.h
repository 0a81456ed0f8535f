// Where a thread writes text for the user.
#pragma once

#include <string>
#include <string_view>

namespace popsim::threads {

// Writes to stderr at once, or to the text of the innermost ScopedOutput of the
// calling thread.
void write(std::string_view text);

// While it exists, what the thread writes is added to a text.
class ScopedOutput {
 public:
  explicit ScopedOutput(std::string& text);
  ~ScopedOutput();
  ScopedOutput(const ScopedOutput&) = delete;
  ScopedOutput& operator=(const ScopedOutput&) = delete;

 private:
  std::string* before_;
};

}  // namespace popsim::threads
