#include "dense/matmul.h"

#include "base/check.h"
#include "dense/piece_matmul.h"
#include "dense/tile/matmul.h"
#include "dense/vector/blocked_matmul.h"
#include "dense/vector/half_matmul.h"
#include "dense/vector/short_matmul.h"
#include "dense/vector/vector_matmul.h"

namespace popsim::dense {

std::unique_ptr<Matmul> create_matmul(const MatmulSpec& spec) {
  check_internal(!spec.bias || (spec.alpha == 1.0f && spec.beta == 0.0f),
                 "dense::create_matmul: a bias with alpha ", spec.alpha,
                 " and beta ", spec.beta);
  const bool empty =
      spec.batch == 0 || spec.m == 0 || spec.n == 0 || spec.k == 0;
  if (empty || spec.alpha == 0.0f) return nullptr;
  const bool is_float32 = spec.operand_type == DType::kFloat32 &&
                          spec.result_type == DType::kFloat32;
  if (spec.half_partials) {
    return is_float32 ? create_half_matmul(spec) : nullptr;
  }
  // This code gives the same bits as attention, whatever the dtype in memory.
  if (is_cut(spec)) return is_float32 ? create_batch_matmul(spec) : nullptr;
  if (auto matmul = create_tile_matmul(spec)) return matmul;
  if (!is_float32) return nullptr;
  if (auto matmul = create_short_matmul(spec)) return matmul;
  if (auto matmul = create_vector_matmul(spec)) return matmul;
  return create_blocked_matmul(spec);
}

bool can_fuse(const MatmulSpec& spec) { return create_matmul(spec) != nullptr; }

}  // namespace popsim::dense
