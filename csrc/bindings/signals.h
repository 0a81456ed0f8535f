// Lets Python's signal handlers run while a program runs.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "runtime/stop.h"

namespace popsim::bindings {

// Notices Ctrl-C and other signals while C++ code runs without the
// interpreter's lock. The check for a signal does not take the lock, because
// another thread may hold it for a long time. Make and destroy this object
// around the run, with the lock held.
class SignalOverseer final : public runtime::Overseer {
 public:
  SignalOverseer() = default;
  SignalOverseer(const SignalOverseer&) = delete;
  SignalOverseer& operator=(const SignalOverseer&) = delete;
  ~SignalOverseer() override;

  [[nodiscard]] bool lets_it_go_on() override;
  // Throws the exception that a signal handler raised, if one did.
  void rethrow() const {
    if (error_) throw *error_;
  }

 private:
  enum class State {
    kNew,      // not checked yet
    kPolling,  // checks for signals with the lock held
    kWaiting,  // Python writes a byte to the pipe when a signal comes
    kOff,      // not on the main thread, or a handler has raised already
  };

  [[nodiscard]] State begin();
  [[nodiscard]] bool signal_came() const;

  State state_ = State::kNew;
  int read_end_ = -1;
  int write_end_ = -1;
  std::optional<pybind11::error_already_set> error_;
};

}  // namespace popsim::bindings
