#include "dense/piece_matmul.h"

#include <utility>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "dense/matmul.h"
#include "threads/tasks.h"

namespace popsim::dense {
namespace {

// Short pieces of the rows of attention's scores stay in the second-level
// cache; long pieces are faster if numbers have one or two parts
// (tile/parts.h). Both were measured.
constexpr int64_t kMaxPiece = 128;
constexpr int64_t kMaxSplitPiece = 256;
constexpr int64_t kPieceUnit = 16;
constexpr size_t kAlignment = 64;

// The number of multiplications for one matrix of the batch.
int64_t work_of(const MatmulSpec& spec) { return spec.m * spec.n * spec.k; }

class BatchMatmul final : public Matmul {
 public:
  BatchMatmul(const MatmulSpec& spec, const threads::Shares& shares,
              std::vector<std::unique_ptr<PieceMatmul>> products)
      : spec_(spec),
        shares_(shares),
        products_(std::move(products)),
        workspace_(
            ceil_div(static_cast<int64_t>(products_.front()->workspace_bytes()),
                     kAlignment) *
            kAlignment) {}

  size_t workspace_bytes() const override {
    return workspace_ * products_.size();
  }

  using Matmul::run;
  void run(const MatmulOperands& operands) override {
    shares_.run([&](int64_t share, threads::Range units) {
      run_units(operands, share, units);
    });
  }

 private:
  void run_units(const MatmulOperands& operands, int64_t share,
                 threads::Range units) {
    PieceMatmul& product = *products_[static_cast<size_t>(share)];
    char* workspace = static_cast<char*>(operands.workspace) +
                      static_cast<size_t>(share) * workspace_;
    const int64_t pieces = product.rows().count();
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      const int64_t matrix = unit / pieces;
      const int64_t first = product.rows().begin(unit % pieces);
      product.run_rows(
          unit % pieces,
          operands.a_floats() + matrix * spec_.a.batch + first * spec_.a.row,
          operands.b_floats() + matrix * spec_.b.batch,
          operands.c_floats() + (matrix * spec_.m + first) * spec_.n,
          workspace);
    }
  }

  MatmulSpec spec_;
  threads::Shares shares_;                              // of pieces of rows
  std::vector<std::unique_ptr<PieceMatmul>> products_;  // by share
  size_t workspace_;                                    // bytes of a share
};

}  // namespace

Cut::Cut(int64_t size, int64_t limit)
    : size_(size),
      count_(ceil_div(size, limit)),
      length_(ceil_div(ceil_div(size, count_), kPieceUnit) * kPieceUnit) {
  count_ = ceil_div(size, length_);
}

PieceMatmul::PieceMatmul(const MatmulSpec& spec)
    : spec_(spec),
      rows_(cut(spec.m, spec.significant_bits)),
      depth_(cut(spec.k, spec.significant_bits)) {}

Cut PieceMatmul::cut(int64_t size, int significant_bits) {
  return {size, significant_bits > 16 ? kMaxPiece : kMaxSplitPiece};
}

std::unique_ptr<PieceMatmul> PieceMatmul::create(MatmulSpec spec) {
  check_internal(!spec.bias && spec.alpha == 1.0F &&
                     (spec.beta == 0.0F || spec.beta == 1.0F),
                 "dense::PieceMatmul: more than a sum of products");
  spec.batch = 1;
  spec.a.batch = spec.b.batch = 0;
  spec.one_thread = true;
  auto matmul = std::unique_ptr<PieceMatmul>(new PieceMatmul(spec));
  for (const int64_t row : {int64_t{0}, matmul->rows_.count() - 1}) {
    for (int64_t depth = 0; depth < matmul->depth_.count(); ++depth) {
      if (!matmul->plan_tile(row, depth)) return nullptr;
    }
  }
  return matmul;
}

size_t PieceMatmul::index_of(int64_t row, int64_t depth) const {
  const bool last_row = row + 1 == rows_.count();
  const bool last_depth = depth + 1 == depth_.count();
  return (last_row ? 4 : 0) + (last_depth ? 2 : 0) + (depth == 0 ? 1 : 0);
}

bool PieceMatmul::plan_tile(int64_t row, int64_t depth) {
  std::unique_ptr<Matmul>& tile = tiles_[index_of(row, depth)];
  if (tile != nullptr) return true;
  MatmulSpec spec = spec_;
  spec.m = rows_.length(row);
  spec.k = depth_.length(depth);
  if (depth > 0) spec.beta = 1.0F;
  tile = create_matmul(spec);
  return tile != nullptr;
}

size_t PieceMatmul::workspace_bytes() const {
  size_t bytes = 0;
  for (const auto& tile : tiles_) {
    if (tile != nullptr) bytes = std::max(bytes, tile->workspace_bytes());
  }
  return bytes;
}

void PieceMatmul::run_tile(int64_t row, int64_t depth, const float* a,
                           const float* b, float* c, void* workspace) {
  tiles_[index_of(row, depth)]->run(
      {.a = a, .b = b, .c = c, .workspace = workspace});
}

void PieceMatmul::run_rows(int64_t row, const float* a, const float* b,
                           float* c, void* workspace) {
  for (int64_t depth = 0; depth < depth_.count(); ++depth) {
    const int64_t first = depth_.begin(depth);
    run_tile(row, depth, a + first * spec_.a.column, b + first * spec_.b.row, c,
             workspace);
  }
}

void PieceMatmul::run_depth(int64_t depth, const float* a, const float* b,
                            float* c, void* workspace) {
  for (int64_t row = 0; row < rows_.count(); ++row) {
    const int64_t first = rows_.begin(row);
    run_tile(row, depth, a + first * spec_.a.row, b, c + first * spec_.n,
             workspace);
  }
}

bool is_cut(const MatmulSpec& spec) {
  const bool simple = !spec.bias && !spec.relu && !spec.mask && !spec.update &&
                      spec.alpha == 1.0F &&
                      (spec.beta == 0.0F || spec.beta == 1.0F);
  return simple && spec.batch > 1 && spec.a.batch != 0 && spec.b.batch != 0 &&
         work_of(spec) >= kMinCutWork;
}

std::unique_ptr<Matmul> create_batch_matmul(const MatmulSpec& spec) {
  std::vector<std::unique_ptr<PieceMatmul>> products;
  const int64_t units =
      spec.batch * PieceMatmul::cut(spec.m, spec.significant_bits).count();
  const threads::Shares shares(
      threads::multiplications(spec.batch * work_of(spec)), units);
  for (int64_t share = 0; share < shares.limit(); ++share) {
    products.push_back(PieceMatmul::create(spec));
    if (products.back() == nullptr) return nullptr;
  }
  return std::make_unique<BatchMatmul>(spec, shares, std::move(products));
}

}  // namespace popsim::dense
