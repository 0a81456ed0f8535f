// Which IPU runs each op and keeps each tensor, and what crosses between IPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"
#include "machine/estimate/settings.h"

namespace popsim::machine {

// The bytes of a tensor on the device, which has no numbers of 64 bits.
[[nodiscard]] int64_t device_bytes(const graph::Tensor& tensor);

// A tensor that one micro-batch sends from IPU to IPU.
struct Crossing {
  graph::TensorId tensor;  // the owner of its memory
  int32_t from;
  int32_t to;
  int64_t bytes;
  // The action after which it is sent.
  graph::Phase phase;
  int32_t stage;
  // The first op that reads it there.
  size_t reader;
};

struct Places {
  std::vector<int32_t> ipu_of_op;
  std::vector<int32_t> ipu_of_tensor;  // by owner; -1: no op uses it
  std::vector<Crossing> crossings;
  int32_t num_ipus = 1;
};

[[nodiscard]] Places find_places(const graph::Graph& graph,
                                 const Settings& settings);

}  // namespace popsim::machine
