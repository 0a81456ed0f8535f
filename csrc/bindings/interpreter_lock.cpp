#include "bindings/interpreter_lock.h"

#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace popsim::bindings {
namespace {

// Runs what takes the lock; does not return where Python is gone.
template <typename Take>
auto take_or_sleep(const Take& take) {
#if defined(__GLIBCXX__)
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    // (this has no end but that of the process)
    for (;;) pause();
  }
#else  // elsewhere a thread ends without an exception, and no destructor runs
  return take();
#endif
}

}  // namespace

Unlocked::~Unlocked() {
  take_or_sleep([this] { PyEval_RestoreThread(state_); });
}

Locked::Locked() : state_(take_or_sleep([] { return PyGILState_Ensure(); })) {}

}  // namespace popsim::bindings
