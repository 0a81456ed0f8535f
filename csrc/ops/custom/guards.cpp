#include "ops/custom/guards.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace popsim::ops::custom {
namespace {

// A byte that a kernel is unlikely to write; as a float, four of them are about
// -1e34.
constexpr std::byte kPattern{0xf7};

bool is_untouched(const std::byte* start, size_t count) {
  return std::all_of(start, start + count,
                     [](std::byte b) { return b == kPattern; });
}

}  // namespace

Guards::Guards(size_t num_inputs, std::vector<size_t> bytes)
    : num_inputs_(num_inputs), bytes_(std::move(bytes)) {
  for (const size_t size : bytes_) {
    copies_.emplace_back(size + 2 * kGuardBytes, kPattern);
  }
}

void Guards::put(Call& call, const std::vector<void*>& operands) {
  for (size_t i = 0; i < operands.size(); ++i) {
    std::ranges::fill(copies_[i], kPattern);
    if (bytes_[i] > 0) std::memcpy(data(i), operands[i], bytes_[i]);
    call.set_data(i, data(i));
  }
}

void Guards::take(const std::vector<void*>& operands) const {
  for (size_t i = 0; i < operands.size(); ++i) {
    const bool is_input = i < num_inputs_;
    const std::string shown =
        join(is_input ? "input " : "output ", is_input ? i : i - num_inputs_);
    const std::byte* start = copies_[i].data();
    const std::byte* data = start + kGuardBytes;
    check_user(is_untouched(start, kGuardBytes),
               "the kernel writes before the memory of ", shown);
    check_user(is_untouched(data + bytes_[i], kGuardBytes),
               "the kernel writes after the memory of ", shown);
    if (bytes_[i] == 0) continue;
    if (is_input) {
      check_user(std::memcmp(data, operands[i], bytes_[i]) == 0,
                 "the kernel writes to ", shown);
    } else {
      std::memcpy(operands[i], data, bytes_[i]);
    }
  }
}

}  // namespace popsim::ops::custom
