#include "bindings/interpreter_lock.h"

#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace popsim::bindings {
namespace {

// Calls `take`, which takes the lock; does not return after Python has ended.
template <typename Take>
auto take_or_sleep(const Take& take) {
#if defined(__GLIBCXX__)
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    // (the loop ends only with the process)
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
