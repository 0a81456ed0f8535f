// How the steps of a recurrent layer are shared between threads.
#pragma once

#include "dense/vector/panels.h"
#include "threads/tasks.h"

namespace popsim::ops::recurrent {

using dense::Panels;
using threads::Range;

// Either every thread runs the whole sequence for some rows of the batch, which
// are independent of each other, or all threads compute some of the units and
// wait for each other after each step.
class Split {
 public:
  Split(int64_t steps, int64_t batch, const Panels& panels);

  // Calls step(index, rows, panels) for all steps in order.
  template <typename Step>
  void run(int64_t steps, const Step& step) const {
    if (by_rows()) {
      rows_.run([&](int64_t /*share*/, Range rows) {
        for (int64_t i = 0; i < steps; ++i) step(i, rows, all_panels_);
      });
      return;
    }
    for (int64_t i = 0; i < steps; ++i) {
      panels_.run(
          [&](int64_t /*share*/, Range panels) { step(i, all_rows_, panels); });
    }
  }

 private:
  // If both ways keep the same number of threads busy, waiting less often is
  // better.
  [[nodiscard]] bool by_rows() const;

  Range all_rows_;
  Range all_panels_;
  threads::Shares rows_;
  threads::Shares panels_;
};

}  // namespace popsim::ops::recurrent
