// The processor's matrix units, one function per instruction. units.cpp
// configures the tiles: each has 16 rows of 64 bytes.
#pragma once

#include <cstdint>

namespace popsim::dense {

// The compilers' intrinsics are macros that paste the number of a tile: a
// template parameter does not work there.
class ProcessorUnits {
 public:
  // The compiler does not know which memory the instructions read and write.
  ProcessorUnits() { memory_barrier(); }
  ProcessorUnits(const ProcessorUnits&) = delete;
  ProcessorUnits& operator=(const ProcessorUnits&) = delete;
  ~ProcessorUnits() { memory_barrier(); }

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }

  // `stride`: bytes between rows.
  template <int kTile>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(from), "r"(stride), "i"(kTile));
  }

  template <int kTile>
  void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(to), "r"(stride), "i"(kTile)
                 : "memory");
  }

  // Adds the product of tiles of bfloat16 numbers to one of float32.
  template <int kSum, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"(kSum), "i"(kA), "i"(kB));
  }

 private:
  static void memory_barrier() { asm volatile("" ::: "memory"); }
};

}  // namespace popsim::dense
