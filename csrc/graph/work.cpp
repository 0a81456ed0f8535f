#include "graph/work.h"

#include <array>
#include <limits>
#include <type_traits>

namespace popsim::graph {
namespace {

struct Flops {
  double operator()(const Product& p) const {
    return 2.0 * times({p.batch, p.rows, p.columns, p.depth});
  }
  double operator()(const Convolution& c) const {
    return 2.0 * times({c.batch, c.positions, c.kernel, c.groups, c.in_channels,
                        c.out_channels});
  }
  double operator()(const Elementwise& e) const {
    return times({e.elements, e.cost});
  }
  double operator()(const Reduce& r) const { return times({r.elements}); }
  double operator()(const Random& /*r*/) const { return 0.0; }
  double operator()(const Move& /*m*/) const { return 0.0; }
  double operator()(const Host& /*h*/) const { return 0.0; }

  // A product as a double, because it may be too large for an integer.
  static double times(std::initializer_list<int64_t> sizes) {
    double product = 1.0;
    for (const int64_t size : sizes) product *= static_cast<double>(size);
    return product;
  }
};

constexpr std::array<std::string_view, std::variant_size_v<Work>> kNames{
    "product", "convolution", "elementwise", "reduce",
    "random",  "move",        "host"};

}  // namespace

double flops(const Work& work) { return std::visit(Flops{}, work); }

int64_t bytes(const Work& work) {
  if (const auto* move = std::get_if<Move>(&work)) return move->bytes;
  if (const auto* host = std::get_if<Host>(&work)) return host->bytes;
  return 0;
}

std::string_view name_of(const Work& work) { return kNames.at(work.index()); }

Work repeated(Work work, int64_t times) {
  const auto repeat = [times](int64_t& count) {
    if (__builtin_mul_overflow(count, times, &count)) {
      count = std::numeric_limits<int64_t>::max();
    }
  };
  std::visit(
      [&repeat](auto& part) {
        using Part = std::decay_t<decltype(part)>;
        if constexpr (std::is_same_v<Part, Product> ||
                      std::is_same_v<Part, Convolution>) {
          repeat(part.batch);
        } else if constexpr (std::is_same_v<Part, Move> ||
                             std::is_same_v<Part, Host>) {
          repeat(part.bytes);
        } else {
          repeat(part.elements);
        }
      },
      work);
  return work;
}

}  // namespace popsim::graph
