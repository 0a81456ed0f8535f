#include "bindings/interpreter_lock.h"

#include <cxxabi.h>
#include <unistd.h>

namespace popsim::bindings {
namespace {

// Runs what takes the lock; does not return where Python is gone.
template <typename Take>
auto take_or_sleep(const Take& take) {
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    // (this has no end but that of the process)
    for (;;) pause();
  }
}

}  // namespace

Unlocked::~Unlocked() {
  take_or_sleep([this] { PyEval_RestoreThread(state_); });
}

Locked::Locked() : state_(take_or_sleep([] { return PyGILState_Ensure(); })) {}

}  // namespace popsim::bindings
