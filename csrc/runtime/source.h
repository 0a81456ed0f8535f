// Where the values of a program's inputs come from.
#pragma once

#include <cstdint>

namespace popsim::runtime {

// One input of the program. Asked once per action.
class Source {
 public:
  virtual ~Source() = default;
  // The value for a micro-batch, counted from the start of the run. It stays
  // there, unchanged, as long as the micro-batch is in flight.
  [[nodiscard]] virtual void* micro_batch(int64_t index) = 0;
};

// A part of a tensor that the caller gave, which is read where it is.
class CallSlice final : public Source {
 public:
  explicit CallSlice(int64_t bytes) : bytes_(bytes) {}

  // To be called before each run.
  void point_at(void* whole) { whole_ = static_cast<char*>(whole); }
  [[nodiscard]] void* micro_batch(int64_t index) override {
    return whole_ + index * bytes_;
  }

 private:
  int64_t bytes_;  // of one micro-batch
  char* whole_ = nullptr;
};

}  // namespace popsim::runtime
