// The product of each step of a recurrent layer, with the weight of h: on the
// matrix units of the processor if they are faster, else on vector units.
#pragma once

#include <cstdint>
#include <optional>

#include "dense/tile_panels.h"
#include "dense/vector/panels.h"
#include "ops/recurrent/layer.h"
#include "threads/tasks.h"

namespace popsim::ops::recurrent {

using threads::Range;

// What one thread computes of a step.
struct Part {
  int64_t share;
  Range rows;
  Range panels;
};

// Weights of shape (gates * hidden, depth) or, if `transposed`, (depth,
// hidden).
struct StepWeights {
  int64_t gates;
  int64_t depth;
  bool transposed;
};

class StepProduct {
 public:
  StepProduct(const Dims& dims, const StepWeights& weights,
              Workspace& workspace);

  // Packs the weights; they must remain where they are. Then calls
  // step(index, part) for all steps in order: either every thread runs the
  // whole sequence for some rows of the batch, which are independent of each
  // other, or all threads compute some of the units and wait for each other
  // after each step.
  template <typename Step>
  void run(const float* weights, char* workspace, int64_t steps,
           const Step& step) const;

  // Calls visit(row, unit, count, product, stride) as Panels::multiply does.
  // `a` is the first row of the batch; the rows are adjacent.
  template <typename... Visits>
  void multiply(const float* weights, char* workspace, const float* a,
                const Part& part, const Visits&... visits) const;
  // Calls visit(row, unit, count) for the same units.
  template <typename Visit>
  void for_each(const Part& part, Visit&& visit) const {
    panels_.for_each(part.rows, part.panels, visit);
  }

 private:
  [[nodiscard]] int64_t step_work() const;
  [[nodiscard]] threads::Shares shares_of_rows(int64_t steps) const;
  // If both ways keep the same number of threads busy, waiting less often is
  // better.
  [[nodiscard]] bool by_rows() const;
  void pack(const float* weights, char* workspace) const;
  [[nodiscard]] dense::TilePanels::Weights unit_weights(const float* weights,
                                                        char* workspace) const {
    return {.plain = weights, .packed = workspace + packed_};
  }

  int64_t batch_;
  StepWeights weights_;
  dense::Panels panels_;
  std::optional<dense::TilePanels> units_;
  int64_t block_;  // threads divide the rows into blocks of this size
  threads::Shares rows_;
  threads::Shares panel_shares_;
  size_t packed_;
  size_t packed_rows_;  // of each thread, for the units
};

template <typename Step>
void StepProduct::run(const float* weights, char* workspace, int64_t steps,
                      const Step& step) const {
  pack(weights, workspace);
  if (by_rows()) {
    rows_.run([&](int64_t share, Range blocks) {
      const Part part{.share = share,
                      .rows = {blocks.begin * block_,
                               std::min(batch_, blocks.end * block_)},
                      .panels = {0, panels_.count()}};
      for (int64_t i = 0; i < steps; ++i) step(i, part);
    });
    return;
  }
  for (int64_t i = 0; i < steps; ++i) {
    panel_shares_.run([&](int64_t share, Range panels) {
      step(i, {.share = share, .rows = {0, batch_}, .panels = panels});
    });
  }
}

template <typename... Visits>
void StepProduct::multiply(const float* weights, char* workspace,
                           const float* a, const Part& part,
                           const Visits&... visits) const {
  if (!units_) {
    panels_.multiply(reinterpret_cast<const float*>(workspace + packed_), a,
                     weights_.depth, part.rows, part.panels, visits...);
    return;
  }
  char* packed_rows = workspace + packed_rows_ +
                      part.share * static_cast<int64_t>(units_->row_bytes());
  units_->multiply(unit_weights(weights, workspace), a, weights_.depth,
                   part.rows, part.panels, packed_rows, visits...);
}

}  // namespace popsim::ops::recurrent
