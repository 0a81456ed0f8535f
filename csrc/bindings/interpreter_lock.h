// Releases Python's lock and takes it again, in threads that may outlive
// Python.
//
// Before version 3.14, Python ends a thread that asks for the lock while the
// process ends: Python unwinds the thread's stack. If a destructor asked for
// the lock, unwinding terminates the process. Threads that ask through these
// classes sleep instead until the process has ended.
#pragma once

#include <pybind11/pybind11.h>

namespace popsim::bindings {

// Releases the lock for a scope; the thread must hold the lock.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked();

 private:
  PyThreadState* state_;
};

// Holds the lock for a scope, whether or not the thread holds it already.
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
