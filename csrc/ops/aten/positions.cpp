#include "ops/aten/positions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/check.h"

namespace popsim::ops {
namespace {

// The argument of an operator that is a tensor of positions, and the axes that
// they are positions of: one axis of the tensor before it, or its last axes
// together.
struct Positions {
  std::string_view name;
  size_t argument;
  int64_t last_axes;  // 0: the axis of classes
};

// The argument of the losses with the label that is ignored.
constexpr size_t kIgnored = 5;

// Forward operators check their positions; the gradients of these operators do
// not check them again.
constexpr std::array<Positions, 6> kPositions{{
    {"aten::adaptive_max_pool2d_backward", 2, 2},
    {"aten::adaptive_max_pool3d_backward", 2, 3},
    {"aten::max_pool2d_with_indices_backward", 7, 2},
    {"aten::max_pool3d_with_indices_backward", 7, 3},
    {"aten::nll_loss2d_backward", 2, 0},
    {"aten::nll_loss_backward", 2, 0},
}};

// Operators that refuse a position but do not say which one: the argument with
// the positions, and the axis of the first argument that they are positions of.
enum Axis : int8_t { kFirst = 0, kLast = -1, kGiven = 1 };
struct Unnamed {
  std::string_view name;
  size_t argument;
  Axis axis;
  int64_t least = 0;
};

constexpr std::array<Unnamed, 5> kUnnamed{{
    {"aten::embedding", 1, kFirst},
    {"aten::index_reduce", 2, kGiven},
    {"aten::index_select", 2, kGiven},
    {"aten::multi_margin_loss", 1, kLast},
    {"aten::multilabel_margin_loss_forward", 1, kLast, -1},
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
  if (!outside.any().item<bool>()) return;
  const at::Tensor wrong = positions.masked_select(outside);
  throw UserError(join(name, ": position ", wrong[0].item<int64_t>(),
                       " is out of range: the size is ", limit));
}

std::string wrong_position(const std::string& name,
                           const std::vector<c10::IValue>& arguments) {
  const auto* entry = std::ranges::find(kUnnamed, name, &Unnamed::name);
  if (entry == kUnnamed.end()) return "";
  const at::Tensor& positions = arguments[entry->argument].toTensor();
  const at::Tensor& x = arguments[0].toTensor();
  const int64_t axis = entry->axis == kGiven
                           ? arguments[1].toInt()
                           : static_cast<int64_t>(entry->axis);
  const int64_t limit = x.dim() == 0 ? 1 : x.size(axis);
  const at::Tensor outside =
      positions.lt(entry->least).logical_or_(positions.ge(limit));
  const at::Tensor wrong = positions.masked_select(outside);
  if (wrong.numel() == 0) return "";
  return join(": ", wrong[0].item<int64_t>(), " is out of range: the size is ",
              limit);
}

}  // namespace popsim::ops
