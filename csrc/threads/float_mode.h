// How a thread rounds, and whether it takes small numbers for zero
// (torch.set_flush_denormal).
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace popsim::threads {

#if defined(__SSE__)

// Without x87's, which only `long double` has, this takes a few nanoseconds.
class FloatMode {
 public:
  // That of the calling thread.
  FloatMode() : bits_(_mm_getcsr() & ~kExceptions) {}
  // Gives it to the calling thread.
  void apply() const {
    const unsigned now = _mm_getcsr();
    if ((now & ~kExceptions) != bits_) _mm_setcsr(bits_ | (now & kExceptions));
  }

 private:
  static constexpr unsigned kExceptions = 0x3f;  // which ones have occurred

  unsigned bits_;
};

#else

class FloatMode {
 public:
  FloatMode() { std::fegetenv(&mode_); }
  void apply() const { std::fesetenv(&mode_); }

 private:
  std::fenv_t mode_;
};

#endif

}  // namespace popsim::threads
