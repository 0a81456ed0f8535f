#include "ops/recurrent/step_product.h"

#include <algorithm>

#include "base/numbers.h"

namespace popsim::ops::recurrent {
namespace {

// Weights up to this size fit in a core's second-level cache.
constexpr size_t kCachedBytes = size_t{1} << 20;
// With fewer rows, reading the weights costs more than it is worth, cached or
// not.
constexpr int64_t kFewRows = 4;
constexpr int64_t kFewRowsUncached = 32;

std::optional<dense::TilePanels> units_for(const Dims& dims,
                                           const StepWeights& weights,
                                           const dense::Panels& panels) {
  // Whole products keep the order of their sums.
  const bool reduced = dims.significant_bits < 24;
  if (!reduced || dims.half_partials ||
      !dense::TilePanels::pays(panels, dims.batch, dims.steps,
                               dims.significant_bits)) {
    return std::nullopt;
  }
  return dense::TilePanels(panels, weights.transposed, dims.significant_bits);
}

}  // namespace

StepProduct::StepProduct(const Dims& dims, const StepWeights& weights,
                         Workspace& workspace)
    : batch_(dims.batch),
      weights_(weights),
      panels_(weights.gates, dims.hidden, weights.depth,
              dims.passes(weights.depth)),
      units_(units_for(dims, weights, panels_)),
      block_(units_ ? units_->rows_per_block() : 1),
      rows_(shares_of_rows(dims.steps)),
      panel_shares_(threads::multiplications(step_work()), panels_.count()),
      packed_(
          workspace.add(units_ ? units_->weight_bytes() : panels_.bytes())) {
  const int64_t shares = std::max(rows_.limit(), panel_shares_.limit());
  packed_rows_ = workspace.add(
      units_ ? static_cast<size_t>(shares) * units_->row_bytes() : 0);
}

// The work of a step, in multiplications.
int64_t StepProduct::step_work() const {
  return batch_ * static_cast<int64_t>(panels_.bytes() / sizeof(float));
}

threads::Shares StepProduct::shares_of_rows(int64_t steps) const {
  const int64_t few =
      panels_.bytes() <= kCachedBytes ? kFewRows : kFewRowsUncached;
  const int64_t worth = threads::multiplications(steps * step_work()).threads;
  return {{std::min(worth, batch_ / std::max(few, block_))},
          ceil_div(batch_, block_)};
}

bool StepProduct::by_rows() const {
  const int64_t budget = threads::budget();
  return std::min(rows_.limit(), budget) >=
         std::min(panel_shares_.limit(), budget);
}

void StepProduct::pack(const float* weights, char* workspace) const {
  if (units_) {
    units_->pack(unit_weights(weights, workspace));
    return;
  }
  auto* packed = reinterpret_cast<float*>(workspace + packed_);
  if (weights_.transposed) {
    panels_.pack(weights, packed);
  } else {
    panels_.pack_transposed(weights, packed);
  }
}

}  // namespace popsim::ops::recurrent
