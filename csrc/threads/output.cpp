#include "threads/output.h"

#include <cstdio>

namespace popsim::threads {
namespace {

thread_local std::string* current_text = nullptr;

}  // namespace

void write(std::string_view text) {
  if (current_text != nullptr) {
    current_text->append(text);
    return;
  }
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

ScopedOutput::ScopedOutput(std::string& text) : before_(current_text) {
  current_text = &text;
}

ScopedOutput::~ScopedOutput() { current_text = before_; }

}  // namespace popsim::threads
