#include "ops/operands/all_bits.h"

#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>

namespace popsim::ops {
namespace {

// Several threads may run PyTorch's kernels: the first one turns oneDNN off,
// the last one turns it on again.
std::mutex count_mutex;
int64_t num_scopes = 0;

bool fewer_bits_asked_for() {
  constexpr std::array kOps{at::Float32Op::MATMUL, at::Float32Op::CONV,
                            at::Float32Op::RNN};
  return std::ranges::any_of(kOps, [](at::Float32Op op) {
    const auto precision =
        at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
    return precision == at::Float32Precision::TF32 ||
           precision == at::Float32Precision::BF16;
  });
}

}  // namespace

AllBits::AllBits() {
  if (!fewer_bits_asked_for()) return;
  const std::scoped_lock lock(count_mutex);
  if (num_scopes == 0) {
    if (!at::globalContext().userEnabledMkldnn()) return;
    at::globalContext().setUserEnabledMkldnn(false);
  }
  ++num_scopes;
  counted_ = true;
}

AllBits::~AllBits() {
  if (!counted_) return;
  const std::scoped_lock lock(count_mutex);
  if (--num_scopes == 0) at::globalContext().setUserEnabledMkldnn(true);
}

}  // namespace popsim::ops
