// How the steps of a recurrent layer are shared between threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#include "dense/vector/panels.h"

namespace popsim::ops::recurrent {

using dense::Panels;
using dense::Range;

// Either every thread runs the whole sequence for some of the batch's rows,
// which are independent of each other, or all meet after each step and every
// thread has some of the units.
struct Split {
  int64_t num_tasks = 1;
  bool by_rows = true;
};

[[nodiscard]] Split plan_split(int64_t steps, int64_t batch,
                               const Panels& panels);

[[nodiscard]] inline Range share(int64_t count, int64_t task,
                                 int64_t num_tasks) {
  return {count * task / num_tasks, count * (task + 1) / num_tasks};
}

// Calls step(index, rows, panels) for all steps in their order.
template <typename Step>
void run_steps(const Split& split, int64_t steps, int64_t batch,
               const Panels& panels, const Step& step) {
  const Range all_rows{0, batch};
  const Range all_panels{0, panels.count()};
  const int64_t num_tasks = split.num_tasks;
  const auto run_rows = [&](Range rows) {
    for (int64_t i = 0; i < steps; ++i) step(i, rows, all_panels);
  };
  if (num_tasks == 1) {
    run_rows(all_rows);
  } else if (split.by_rows) {
    at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        run_rows(share(batch, task, num_tasks));
      }
    });
  } else {
    for (int64_t i = 0; i < steps; ++i) {
      at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          step(i, all_rows, share(panels.count(), task, num_tasks));
        }
      });
    }
  }
}

}  // namespace popsim::ops::recurrent
