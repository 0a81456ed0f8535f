// Python's lock, given back and taken by threads that may outlive Python.
//
// Until version 3.14 Python ends a thread that asks for the lock while the
// process ends: its stack is unwound, from a destructor as likely as not, which
// terminates the process. Threads that ask here sleep instead, until the
// process is gone.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

// Runs the scope without the lock, which the thread has.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked();

 private:
  PyThreadState* state_;
};

// Runs the scope with the lock, whether the thread has it or not.
class Locked {
 public:
  Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

}  // namespace popsim::bindings
