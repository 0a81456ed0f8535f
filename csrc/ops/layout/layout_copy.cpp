#include "ops/layout/layout_copy.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/numbers.h"
#include "dense/vector/transpose.h"
#include "ops/operands/strided_walk.h"

namespace popsim::ops {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kTransposedRows = 64;  // of a unit of work
constexpr int64_t kUnitElements = 4096;

// Merges axes if both tensors allow it; the target's innermost axis is the last
// one.
std::vector<CopyAxis> merged_axes(const graph::Tensor& from,
                                  const graph::Tensor& to) {
  const MergedAxes merged =
      merge_axes(to.shape, std::array{from.strides, to.strides}, to.strides);
  std::vector<CopyAxis> axes;
  for (size_t i = 0; i < merged.sizes.size(); ++i) {
    if (merged.sizes[i] == 1) continue;
    axes.push_back(
        {merged.sizes[i], merged.strides[0][i], merged.strides[1][i]});
  }
  return axes;
}

CopyAxis take(std::vector<CopyAxis>& axes, size_t index) {
  const CopyAxis axis = axes[index];
  axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(index));
  return axis;
}

// Prefetches the next tile, kTile columns later: its cache lines are far apart,
// so the processor does not predict them.
template <typename T>
void prefetch_tile(const T* tile, int64_t stride) {
  for (int64_t k = kTile; k < 2 * kTile; ++k) {
    __builtin_prefetch(tile + k * stride);
  }
}

CopyPlan plan_copy(const graph::Tensor& from, const graph::Tensor& to) {
  CopyPlan plan;
  plan.outer = merged_axes(from, to);
  if (plan.outer.empty()) return plan;
  plan.columns = take(plan.outer, plan.outer.size() - 1);
  if (plan.outer.empty()) return plan;
  size_t rows = plan.outer.size() - 1;
  if (plan.columns.from > 1) {
    // For a transpose, the rows are the innermost axis of the source.
    const auto inner =
        std::find_if(plan.outer.begin(), plan.outer.end(),
                     [](const CopyAxis& axis) { return axis.from == 1; });
    if (inner != plan.outer.end()) {
      rows = static_cast<size_t>(inner - plan.outer.begin());
    }
  }
  plan.rows = take(plan.outer, rows);
  return plan;
}

}  // namespace

LayoutCopy::LayoutCopy(const graph::Tensor& from, const graph::Tensor& to)
    : plan_(plan_copy(from, to)), item_bytes_(size_in_bytes(to.dtype)) {
  const CopyAxis& rows = plan_.rows;
  const CopyAxis& columns = plan_.columns;
  transposes_ = rows.from == 1 && columns.from > 1 && columns.to == 1;
  // A tensor without elements has rows without columns.
  rows_per_unit_ =
      transposes_
          ? kTransposedRows
          : kUnitElements / std::clamp<int64_t>(columns.size, 1, kUnitElements);
  units_per_plane_ = ceil_div(rows.size, rows_per_unit_);
  int64_t num_units = units_per_plane_;
  for (const CopyAxis& axis : plan_.outer) num_units *= axis.size;
  shares_ = threads::Shares(threads::elements(to.numel()), num_units);
}

void LayoutCopy::run(const void* from, void* to) const {
  switch (item_bytes_) {
    case 1:
      return run_as<uint8_t>(from, to);
    case 2:
      return run_as<at::Half>(from, to);
    case 4:
      return run_as<float>(from, to);
    default:
      return run_as<double>(from, to);
  }
}

template <typename T>
void LayoutCopy::run_as(const void* from, void* to) const {
  shares_.run([&](int64_t /*share*/, threads::Range units) {
    for (int64_t i = units.begin; i < units.end; ++i) {
      copy_unit(static_cast<const T*>(from), static_cast<T*>(to), i);
    }
  });
}

template <typename T>
void LayoutCopy::copy_unit(const T* from, T* to, int64_t unit) const {
  const int64_t first = unit % units_per_plane_ * rows_per_unit_;
  const int64_t rows = std::min(rows_per_unit_, plan_.rows.size - first);
  from += first * plan_.rows.from;
  to += first * plan_.rows.to;
  int64_t plane = unit / units_per_plane_;
  for (size_t i = plan_.outer.size(); i-- > 0;) {
    const CopyAxis& axis = plan_.outer[i];
    from += plane % axis.size * axis.from;
    to += plane % axis.size * axis.to;
    plane /= axis.size;
  }
  if (transposes_) {
    transpose(from, to, rows);
  } else {
    copy_rows(from, to, rows);
  }
}

template <typename T>
void LayoutCopy::copy_rows(const T* from, T* to, int64_t count) const {
  const CopyAxis& rows = plan_.rows;
  const CopyAxis& columns = plan_.columns;
  const bool adjacent = columns.from == 1 && columns.to == 1;
  for (int64_t r = 0; r < count; ++r, from += rows.from, to += rows.to) {
    if (adjacent) {
      std::memcpy(to, from, static_cast<size_t>(columns.size) * sizeof(T));
      continue;
    }
    if (columns.from == 0 && columns.to == 1) {
      std::fill_n(to, columns.size, *from);
      continue;
    }
    for (int64_t c = 0; c < columns.size; ++c) {
      to[c * columns.to] = from[c * columns.from];
    }
  }
}

// Copies tile by tile, so that whole cache lines are used.
template <typename T>
void LayoutCopy::transpose(const T* from, T* to, int64_t rows) const {
  const int64_t columns = plan_.columns.size;
  const int64_t from_stride = plan_.columns.from;
  const int64_t to_stride = plan_.rows.to;
  for (int64_t c = 0; c < columns; c += kTile) {
    const int64_t width = std::min(kTile, columns - c);
    for (int64_t r = 0; r < rows; r += kTile) {
      const int64_t height = std::min(kTile, rows - r);
      const T* source = from + c * from_stride + r;
      T* target = to + r * to_stride + c;
      if (c + kTile < columns) prefetch_tile(source, from_stride);
      if (width == kTile && height == kTile) {
        dense::transpose_square<kTile>(source, from_stride, target, to_stride);
        continue;
      }
      for (int64_t i = 0; i < height; ++i) {
        for (int64_t k = 0; k < width; ++k) {
          target[i * to_stride + k] = source[i + k * from_stride];
        }
      }
    }
  }
}

}  // namespace popsim::ops
