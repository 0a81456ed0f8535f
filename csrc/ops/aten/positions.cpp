#include "ops/aten/positions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/check.h"

namespace popsim::ops {
namespace {

// Where an operator has a tensor of positions, and what they are positions of:
// one axis of the tensor in front of it, or its last axes taken together.
struct Positions {
  std::string_view name;
  size_t argument;
  int64_t last_axes;  // 0: the axis of classes
};

constexpr size_t kIgnored = 5;  // argument of the losses: no class

// Forward operators check what they are given; their gradients rely on that.
constexpr std::array<Positions, 6> kPositions{{
    {"aten::adaptive_max_pool2d_backward", 2, 2},
    {"aten::adaptive_max_pool3d_backward", 2, 3},
    {"aten::max_pool2d_with_indices_backward", 7, 2},
    {"aten::max_pool3d_with_indices_backward", 7, 3},
    {"aten::nll_loss2d_backward", 2, 0},
    {"aten::nll_loss_backward", 2, 0},
}};

const Positions* find(std::string_view name) {
  const auto* found = std::ranges::find(kPositions, name, &Positions::name);
  return found == kPositions.end() ? nullptr : found;
}

int64_t limit_of(const Positions& entry, const at::Tensor& x) {
  if (entry.last_axes == 0) return x.size(x.dim() == 1 ? 0 : 1);
  int64_t limit = 1;
  for (int64_t i = 1; i <= entry.last_axes; ++i) limit *= x.size(-i);
  return limit;
}

}  // namespace

bool follows_positions(const std::string& name) {
  return find(name) != nullptr;
}

void check_positions(const std::string& name,
                     const std::vector<c10::IValue>& arguments) {
  const Positions* entry = find(name);
  if (entry == nullptr) return;
  const at::Tensor& positions = arguments[entry->argument].toTensor();
  const int64_t limit = limit_of(*entry, arguments[1].toTensor());
  at::Tensor outside = positions.lt(0).logical_or_(positions.ge(limit));
  if (entry->last_axes == 0) {
    outside.logical_and_(positions.ne(arguments[kIgnored].toInt()));
  }
  check_user(!outside.any().item<bool>(), name,
             ": a position is out of range: there are ", limit);
}

}  // namespace popsim::ops
