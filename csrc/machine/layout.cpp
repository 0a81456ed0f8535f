#include "machine/layout.h"

#include <algorithm>

#include "base/numbers.h"

namespace popsim::machine {
namespace {

constexpr int64_t kLeastBytes = 128;  // of a tensor on a tile, if it has more
constexpr int64_t kGrainBytes = 8;    // tensors are cut between these

// The FNV-1a hash: the same on every machine.
int64_t hash_of(const Shape& shape, int64_t seed) {
  uint64_t hash = 14'695'981'039'346'656'037ULL ^ static_cast<uint64_t>(seed);
  for (const int64_t size : shape) {
    hash = (hash ^ static_cast<uint64_t>(size)) * 1'099'511'628'211ULL;
  }
  return static_cast<int64_t>(hash >> 1U);
}

}  // namespace

int64_t device_size(DType dtype) {
  const int64_t bytes = size_in_bytes(dtype);
  return is_complex(dtype) ? bytes : std::min<int64_t>(bytes, 4);
}

Layouts::Layouts(const graph::Graph& graph, int64_t tiles)
    : graph_(graph), tiles_(tiles), layouts_(graph.tensors().size()) {}

bool Layouts::has(graph::TensorId id) const {
  return layouts_[static_cast<size_t>(graph_.root(id))].has_value();
}

const Layout& Layouts::of(graph::TensorId id) {
  const graph::TensorId root = graph_.root(id);
  std::optional<Layout>& found = layouts_[static_cast<size_t>(root)];
  if (!found) {
    const graph::Tensor& tensor = graph_.tensor(root);
    found = linear(tensor.shape, tensor.dtype);
  }
  return *found;
}

void Layouts::place(graph::TensorId id, const Layout& layout) {
  std::optional<Layout>& found = layouts_[static_cast<size_t>(graph_.root(id))];
  if (!found) found = layout;
}

Layout Layouts::of_view(graph::TensorId id) {
  const graph::Tensor& tensor = graph_.tensor(id);
  const int64_t memory = graph_.tensor(graph_.root(id)).numel();
  Layout layout = of(id);
  if (tensor.numel() > memory) return linear(tensor.shape, tensor.dtype);
  if (tensor.numel() < memory) {
    const int64_t bytes =
        ceil_div(tensor.numel(), layout.tiles) * device_size(tensor.dtype);
    layout.bytes_per_tile = ceil_div(bytes, kGrainBytes) * kGrainBytes;
  }
  return layout;
}

int64_t Layouts::elements_per_tile(graph::TensorId id) {
  return ceil_div(of_view(id).bytes_per_tile,
                  device_size(graph_.tensor(id).dtype));
}

Layout Layouts::linear(const Shape& shape, DType dtype) {
  const int64_t size = device_size(dtype);
  const int64_t numel = std::max<int64_t>(num_elements(shape), 1);
  const int64_t grain = std::max<int64_t>(kGrainBytes / size, 1);
  const int64_t used = std::min(
      tiles_, std::max<int64_t>(ceil_div(numel * size, kLeastBytes), 1));
  const int64_t per = ceil_div(ceil_div(numel, grain), used) * grain * size;
  const int64_t hash = hash_of(shape, 0);
  // Tensors of one size and dtype lie alike, whatever their shapes.
  return {hash_of({numel, size}, 1), hash % tiles_, used, per};
}

Layout Layouts::even(int64_t bytes, int64_t used, int64_t key) {
  const int64_t tiles = std::clamp<int64_t>(used, 1, tiles_);
  const int64_t per =
      ceil_div(ceil_div(bytes, tiles), kGrainBytes) * kGrainBytes;
  return {hash_of({key, tiles}, 2), 0, tiles, per};
}

}  // namespace popsim::machine
