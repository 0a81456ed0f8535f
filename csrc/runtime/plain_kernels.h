// How kernels of PyTorch run in a program, on each thread that runs some.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace popsim::runtime {

// For a scope, kernels of PyTorch record nothing for gradients, and compute in
// the dtypes of the program, whatever torch.autocast would choose.
struct PlainKernels {
  c10::InferenceMode no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace popsim::runtime
