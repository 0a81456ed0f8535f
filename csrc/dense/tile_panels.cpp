#include "dense/tile_panels.h"

#include <array>
#include <cmath>

#include "base/numbers.h"
#include "dense/tile/plain_block.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

using Vec = at::vec::Vectorized<float>;

static_assert(kMaxPanelVectors == kMaxRowVectors);

// One more thread pays off for packing this number of steps.
constexpr int64_t kStepsForOneThread = 64;
// With fewer rows, most of the units' work is on empty rows. Indexed by the
// number of parts.
constexpr std::array<int64_t, 4> kMinRowsByParts{0, 4, 6, 12};
// Packing the weights takes as long as this number of rows saves.
constexpr int64_t kMinUses = 128;

}  // namespace

bool TilePanels::pays(const Panels& panels, int64_t rows, int64_t times,
                      int significant_bits) {
  const int num_parts = num_parts_of(significant_bits);
  return kLanes == kTileRows && multiplies_tiles(num_parts) &&
         panels.depth() >= kStepDepth && panels.hidden() >= kTileRows &&
         rows >= kMinRowsByParts.at(static_cast<size_t>(num_parts)) &&
         rows * times >= kMinUses;
}

TilePanels::TilePanels(const Panels& panels, bool transposed,
                       int significant_bits)
    : panels_(panels),
      transposed_(transposed),
      num_parts_(num_parts_of(significant_bits)),
      num_steps_(ceil_div(panels.depth(), kStepDepth)),
      rows_per_block_(has_dot_instructions() ? kDotRows : kBlock),
      pack_rows_(pack_function(DType::kFloat32, num_parts_, TileOrder::kRows)),
      pack_columns_(
          pack_function(DType::kFloat32, num_parts_, TileOrder::kPairs)),
      multiply_block_(block_function(num_parts_)),
      multiply_row_(row_function(num_parts_, panels.vectors())) {
  for (int64_t step = 0; step < num_steps_; ++step) {
    steps_.push_back(step * step_size());
  }
}

size_t TilePanels::weight_bytes() const {
  const int64_t numbers = panels_.count() * blocks_per_panel() * block_size();
  return static_cast<size_t>(numbers) * sizeof(uint16_t) +
         static_cast<size_t>(panels_.count()) * sizeof(float);
}

size_t TilePanels::row_bytes() const {
  return static_cast<size_t>(block_size()) * sizeof(uint16_t);
}

PartSource TilePanels::vector_of(const float* weight, int64_t panel,
                                 int64_t vector) const {
  const int64_t hidden = panels_.hidden();
  const int64_t depth = panels_.depth();
  const int64_t unit = panels_.unit_of(panel, vector);
  const int64_t row = panels_.gate_of(vector) * hidden + unit;
  return {.data = weight + (transposed_ ? row : row * depth),
          .dtype = DType::kFloat32,
          .rows = std::clamp<int64_t>(hidden - unit, 0, kTileRows),
          .depth = depth,
          .row_stride = transposed_ ? 1 : depth,
          .depth_stride = transposed_ ? hidden : 1};
}

void TilePanels::pack(const Weights& weights) const {
  const threads::Shares shares(
      threads::work_of(panels_.count() * blocks_per_panel() * num_steps_,
                       kStepsForOneThread),
      panels_.count());
  shares.run([&](int64_t /*share*/, Range panels) {
    for (int64_t i = panels.begin; i < panels.end; ++i) pack_panel(weights, i);
  });
}

void TilePanels::pack_panel(const Weights& weights, int64_t panel) const {
  uint16_t* out = this->panel(weights.packed, panel);
  float sum = 0.0F;
  for (int64_t v = 0; v < panels_.vectors(); ++v) {
    uint16_t* tiles = out + v / 2 * block_size() + v % 2 * kTileNumbers;
    const PartSource source = vector_of(weights.plain, panel, v);
    if (source.rows > 0) {
      sum += pack_columns_(source, {.first_row = 0,
                                    .first_depth = 0,
                                    .num_steps = num_steps_,
                                    .out = tiles});
      continue;
    }
    for (int64_t i = 0; i < num_steps_ * num_parts_; ++i) {
      std::fill_n(tiles + i * 2 * kTileNumbers, kTileNumbers, 0);
    }
  }
  squares(weights.packed)[panel] = sum;
}

TilePanels::Rows TilePanels::pack_rows(const float* a, int64_t lda,
                                       int64_t count, char* memory) const {
  Rows rows{.source = {.data = a,
                       .dtype = DType::kFloat32,
                       .rows = count,
                       .depth = panels_.depth(),
                       .row_stride = lda,
                       .depth_stride = 1},
            .packed = reinterpret_cast<const uint16_t*>(memory),
            .squares = 0.0F};
  rows.squares =
      pack_rows_(rows.source, {.first_row = 0,
                               .first_depth = 0,
                               .num_steps = num_steps_,
                               .out = reinterpret_cast<uint16_t*>(memory)});
  return rows;
}

void TilePanels::multiply_panel(const Weights& weights, const Rows& rows,
                                int64_t panel, float* out) const {
  if (!are_ordinary(rows.squares, squares(weights.packed)[panel],
                    /*num_sums=*/1)) {
    multiply_plain(weights, rows, panel, out);
    return;
  }
  const uint16_t* columns = this->panel(weights.packed, panel);
  const int64_t width = panels_.width();
  const bool two_rows = rows.source.rows > kTileRows;
  if (!two_rows) {
    multiply_row_({.a = rows.packed,
                   .num_rows = rows.source.rows,
                   .b = columns,
                   .block = block_size(),
                   .num_steps = num_steps_,
                   .sums = out,
                   .sum_stride = width});
  } else {
    const auto walk = [&](const uint16_t* packed) -> TileWalk {
      return {.data = packed,
              .part = 2 * kTileNumbers,
              .second = kTileNumbers,
              .steps = steps_.data()};
    };
    for (int64_t i = 0; i < blocks_per_panel(); ++i) {
      multiply_block_({.a = walk(rows.packed),
                       .b = walk(columns + i * block_size()),
                       .num_steps = num_steps_,
                       .two_row_tiles = true,
                       .two_column_tiles = 2 * i + 1 < panels_.vectors(),
                       .sums = out + i * kBlock,
                       .sum_stride = width});
    }
  }
  const Vec scale(sum_scale(DType::kFloat32));
  for (int64_t i = 0; i < rows.source.rows * width; i += kLanes) {
    (scale * Vec::loadu(out + i)).store(out + i);
  }
}

void TilePanels::multiply_plain(const Weights& weights, const Rows& rows,
                                int64_t panel, float* out) const {
  alignas(64) std::array<float, static_cast<size_t>(kBlockNumbers)> sums;
  for (int64_t v = 0; v < panels_.vectors(); ++v) {
    const PartSource columns = vector_of(weights.plain, panel, v);
    if (columns.rows == 0) break;
    multiply_plain_block({.a = rows.source,
                          .b = columns,
                          .row = 0,
                          .column = 0,
                          .first_depth = 0,
                          .last_depth = panels_.depth()},
                         sums.data(), kBlock);
    for (int64_t i = 0; i < rows.source.rows; ++i) {
      std::copy_n(sums.data() + i * kBlock, kTileRows,
                  out + i * panels_.width() + v * kTileRows);
    }
  }
}

}  // namespace popsim::dense
