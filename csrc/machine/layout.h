// Where a tensor lies on the tiles of its IPU.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"
#include "graph/graph.h"

namespace popsim::machine {

// Tensors whose layouts have the same id need no exchange to be used together.
struct Layout {
  int64_t id = 0;
  int64_t first_tile = 0;
  int64_t tiles = 1;           // consecutive tiles, modulo those of the IPU
  int64_t bytes_per_tile = 0;  // on the fullest tile
};

// The bytes of an element on the device, which has no numbers of 64 bits.
[[nodiscard]] int64_t device_size(DType dtype);

// The layouts of the tensors of a graph, by the tensor that owns the memory.
class Layouts {
 public:
  Layouts(const graph::Graph& graph, int64_t tiles);

  [[nodiscard]] int64_t tiles() const { return tiles_; }
  [[nodiscard]] bool has(graph::TensorId id) const;
  // The given layout, or the linear one.
  [[nodiscard]] const Layout& of(graph::TensorId id);
  // As of(), of the elements of a view alone: some of its owner's memory, which
  // stay on their tiles, or more than that, which are spread anew.
  [[nodiscard]] Layout of_view(graph::TensorId id);
  // Sets the layout of the owner of a tensor's memory; the first call counts.
  void place(graph::TensorId id, const Layout& layout);
  // The number of elements of a tensor on its fullest tile.
  [[nodiscard]] int64_t elements_per_tile(graph::TensorId id);

  // `numel` elements over consecutive tiles, at least 128 bytes on each; the
  // first tile depends on the shape, so small tensors are spread.
  [[nodiscard]] Layout linear(const Shape& shape, DType dtype);
  // `bytes` spread evenly over the first `used` tiles. Layouts of equal `key`
  // have equal ids.
  [[nodiscard]] Layout even(int64_t bytes, int64_t used, int64_t key);

 private:
  const graph::Graph& graph_;
  int64_t tiles_;
  std::vector<std::optional<Layout>> layouts_;
};

}  // namespace popsim::machine
