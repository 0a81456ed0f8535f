#include "runtime/usage.h"

#include "base/check.h"

namespace popsim::runtime {

Usage::Run::Run(Usage& usage) : usage_(usage) {
  usage.enter(State::kRunning, "run");
}

Usage::Copy::Copy(Usage& usage, std::string_view what) : usage_(usage) {
  usage.enter(State::kCopying, what);
}

void Usage::enter(State state, std::string_view what) {
  State found = State::kFree;
  if (state_.compare_exchange_strong(found, state)) return;
  if (found == State::kCopying) {
    throw UserError(join(what,
                         ": another thread is reading or writing the tensors "
                         "of this executable; use it from one thread at a "
                         "time"));
  }
  if (state == State::kRunning) {
    throw UserError(
        "run: this executable is already running; call it from one thread at "
        "a time");
  }
  throw UserError(join(what,
                       ": this executable is running; read and write its "
                       "tensors after that call has returned"));
}

bool Usage::stop() {
  State found = State::kRunning;
  return state_.compare_exchange_strong(found, State::kStopping) ||
         found == State::kStopping;
}

}  // namespace popsim::runtime
