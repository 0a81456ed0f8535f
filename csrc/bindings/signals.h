// Lets Python's signal handlers run while a program does.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "runtime/stop.h"

namespace popsim::bindings {

// Ctrl-C and other signals are noticed while C++ runs without the interpreter's
// lock. Whether one came is asked without it: another thread may hold it for
// long. To be made and destroyed with the lock held, around the run.
class SignalOverseer final : public runtime::Overseer {
 public:
  SignalOverseer() = default;
  SignalOverseer(const SignalOverseer&) = delete;
  SignalOverseer& operator=(const SignalOverseer&) = delete;
  ~SignalOverseer() override;

  [[nodiscard]] bool lets_it_go_on() override;
  // Throws what a signal handler raised, if one did.
  void rethrow() const {
    if (error_) throw *error_;
  }

 private:
  enum class State {
    kNew,      // not asked yet
    kPolling,  // signals are looked for with the lock
    kWaiting,  // Python writes a byte to the pipe when one comes
    kOff,      // another thread's business, or a handler has raised already
  };

  [[nodiscard]] State begin();
  [[nodiscard]] bool signal_came() const;

  State state_ = State::kNew;
  int read_end_ = -1;
  int write_end_ = -1;
  std::optional<pybind11::error_already_set> error_;
};

}  // namespace popsim::bindings
