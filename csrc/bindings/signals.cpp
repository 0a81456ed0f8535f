#include "bindings/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "bindings/interpreter_lock.h"

namespace py = pybind11;

namespace popsim::bindings {
namespace {

// Python runs signal handlers only on its main thread.
bool on_main_thread() {
  const auto threading = py::module_::import("threading");
  return threading.attr("get_ident")().equal(
      threading.attr("main_thread")().attr("ident"));
}

// Sets the file descriptor to which Python writes a byte when a signal comes
// (-1: none). Returns the previous one.
int set_wakeup_fd(int descriptor) {
  const auto signal = py::module_::import("signal");
  return signal.attr("set_wakeup_fd")(descriptor).cast<int>();
}

// Other processes do not inherit the two ends, and reads and writes never
// block.
bool open_pipe(std::array<int, 2>& ends) {
  if (pipe(ends.data()) != 0) return false;
  for (const int end : ends) {
    fcntl(end, F_SETFL, O_NONBLOCK);
    fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  return true;
}

}  // namespace

SignalOverseer::~SignalOverseer() {
  if (state_ == State::kNew) return;
  try {
    if (write_end_ >= 0) {
      const int current = set_wakeup_fd(-1);
      // A signal handler may have set another descriptor meanwhile.
      if (current != write_end_) set_wakeup_fd(current);
    }
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the end of a run");
  }
  if (read_end_ >= 0) close(read_end_);
  if (write_end_ >= 0) close(write_end_);
}

bool SignalOverseer::lets_it_go_on() {
  if (state_ == State::kOff) return true;
  if (state_ == State::kWaiting && !signal_came()) return true;
  const Locked lock;
  try {
    if (state_ == State::kNew) state_ = begin();
    if (state_ == State::kOff || PyErr_CheckSignals() == 0) return true;
    error_.emplace();
  } catch (const py::error_already_set& error) {
    // Signal handlers also run in the Python code that begin() calls.
    error_ = error;
  }
  state_ = State::kOff;
  return false;
}

SignalOverseer::State SignalOverseer::begin() {
  if (!on_main_thread()) return State::kOff;
  std::array<int, 2> ends{};
  if (!open_pipe(ends)) return State::kPolling;
  read_end_ = ends[0];
  write_end_ = ends[1];
  const int before = set_wakeup_fd(write_end_);
  if (before < 0) return State::kWaiting;
  // An event loop waits for signals itself.
  set_wakeup_fd(before);
  close(std::exchange(read_end_, -1));
  close(std::exchange(write_end_, -1));
  return State::kPolling;
}

bool SignalOverseer::signal_came() const {
  std::array<char, 64> bytes{};
  return read(read_end_, bytes.data(), bytes.size()) > 0;
}

}  // namespace popsim::bindings
