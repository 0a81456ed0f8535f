#include "dense/matmul.h"

#include "base/check.h"
#include "dense/available.h"
#include "dense/tile/matmul.h"
#include "dense/vector/half_matmul.h"
#include "dense/vector/piece_matmul.h"
#include "dense/vector/short_matmul.h"

#if defined(POPSIM_HAVE_ONEDNN)
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "dense/onednn.h"

namespace popsim::dense {
namespace {

using dnnl::memory;

// Rows and columns of an operand, with the batch in front where there is one.
memory::desc operand_desc(const MatmulSpec& spec, int64_t rows, int64_t columns,
                          const MatrixStrides& strides) {
  if (spec.batch == 1) {
    return plain_desc({rows, columns}, {strides.row, strides.column});
  }
  // oneDNN repeats a matrix whose batch has size 1; it must not have stride 0.
  const bool repeated = strides.batch == 0;
  return plain_desc(
      {repeated ? 1 : spec.batch, rows, columns},
      {repeated ? rows * columns : strides.batch, strides.row, strides.column});
}

memory::desc contiguous_desc(const MatmulSpec& spec, int64_t batch,
                             int64_t rows) {
  memory::dims sizes{batch, rows, spec.n};
  if (spec.batch == 1) sizes.erase(sizes.begin());
  return plain_desc(sizes, contiguous_strides(sizes));
}

dnnl::primitive_attr attributes_of(const MatmulSpec& spec) {
  // Sum comes first, since only there every implementation fuses it:
  // alpha * (a @ b + beta / alpha * c).
  dnnl::post_ops post_ops;
  if (spec.beta != 0.0f) post_ops.append_sum(spec.beta / spec.alpha);
  if (spec.alpha != 1.0f) {
    post_ops.append_eltwise(dnnl::algorithm::eltwise_linear, spec.alpha, 0.0f);
  }
  dnnl::primitive_attr attributes = user_scratchpad();
  attributes.set_post_ops(post_ops);
  return attributes;
}

dnnl::matmul::primitive_desc describe(const MatmulSpec& spec) {
  const auto a = operand_desc(spec, spec.m, spec.k, spec.a);
  const auto b = operand_desc(spec, spec.k, spec.n, spec.b);
  const auto c = contiguous_desc(spec, spec.batch, spec.m);
  const bool allow_empty = true;
  if (!spec.bias) {
    return {cpu(), a, b, c, attributes_of(spec), allow_empty};
  }
  return {cpu(),      a, b, contiguous_desc(spec, 1, 1), c, attributes_of(spec),
          allow_empty};
}

double num_flops(const MatmulSpec& spec) {
  return 2.0 * static_cast<double>(spec.batch) * static_cast<double>(spec.m) *
         static_cast<double>(spec.n) * static_cast<double>(spec.k);
}

class PrimitiveMatmul final : public Matmul {
 public:
  PrimitiveMatmul(const dnnl::matmul::primitive_desc& desc,
                  const MatmulSpec& spec, int num_threads)
      : a_(unbound(desc.src_desc())),
        b_(unbound(desc.weights_desc())),
        c_(unbound(desc.dst_desc())),
        scratchpad_(unbound(desc.scratchpad_desc())),
        num_threads_(num_threads),
        stream_(cpu()) {
    std::vector<std::pair<int, memory>> arguments{
        {DNNL_ARG_SRC, a_},
        {DNNL_ARG_WEIGHTS, b_},
        {DNNL_ARG_DST, c_},
        {DNNL_ARG_SCRATCHPAD, scratchpad_}};
    if (spec.bias) {
      bias_ = unbound(desc.bias_desc());
      arguments.emplace_back(DNNL_ARG_BIAS, bias_);
    }
    step_.emplace(dnnl::matmul(desc), arguments);
  }

  size_t workspace_bytes() const override {
    return scratchpad_.get_desc().get_size();
  }

  void run(const MatmulOperands& operands) override {
    // oneDNN takes what it only reads as non-const, too.
    a_.set_data_handle(const_cast<void*>(operands.a));
    b_.set_data_handle(const_cast<void*>(operands.b));
    if (bias_) bias_.set_data_handle(const_cast<float*>(operands.bias));
    c_.set_data_handle(operands.c);
    scratchpad_.set_data_handle(operands.workspace);
    const ThreadScope scope(num_threads_);
    step_->execute(stream_);
  }

 private:
  memory a_;
  memory b_;
  memory bias_;  // empty where the spec has none
  memory c_;
  memory scratchpad_;
  int num_threads_;
  dnnl::stream stream_;
  std::optional<Step> step_;
};

// A matrix times a vector, or a vector times a matrix. oneDNN's matmul pads the
// vector to a whole block of columns; its BLAS interface does not.
class VectorMatmul final : public Matmul {
 public:
  VectorMatmul(const MatmulSpec& spec, int num_threads)
      : spec_(spec), num_threads_(num_threads) {}

  size_t workspace_bytes() const override { return 0; }

  void run(const MatmulOperands& operands) override {
    float* c = operands.c_floats();
    const bool a_row_major = spec_.a.row_major(spec_.k);
    const bool b_row_major = spec_.b.row_major(spec_.n);
    const ThreadScope scope(num_threads_);
    const dnnl_status_t status = dnnl_sgemm(
        a_row_major ? 'N' : 'T', b_row_major ? 'N' : 'T', spec_.m, spec_.n,
        spec_.k, spec_.alpha, operands.a_floats(),
        a_row_major ? spec_.a.row : spec_.a.column, operands.b_floats(),
        b_row_major ? spec_.b.row : spec_.b.column, spec_.beta, c, spec_.n);
    check_internal(status == dnnl_success, "oneDNN failed with status ",
                   status);
    // Behind the product, as an addition of its own would be.
    if (!spec_.bias) return;
    for (int64_t row = 0; row < spec_.m; ++row) {
      float* out = c + row * spec_.n;
      for (int64_t i = 0; i < spec_.n; ++i) out[i] += operands.bias[i];
    }
  }

 private:
  MatmulSpec spec_;
  int num_threads_;
};

std::unique_ptr<Matmul> create_matmul(const MatmulSpec& spec) {
  const int num_threads =
      spec.one_thread ? 1 : num_threads_for(num_flops(spec));
  if (spec.batch == 1 && (spec.m == 1 || spec.n == 1)) {
    return std::make_unique<VectorMatmul>(spec, num_threads);
  }
  const ThreadScope scope(num_threads);
  const dnnl::matmul::primitive_desc desc = describe(spec);
  if (!desc || !is_fast(desc)) return nullptr;
  return std::make_unique<PrimitiveMatmul>(desc, spec, num_threads);
}

}  // namespace
}  // namespace popsim::dense
#endif

namespace popsim::dense {

std::unique_ptr<Matmul> Matmul::create(const MatmulSpec& spec) {
  check_internal(!spec.bias || (spec.alpha == 1.0f && spec.beta == 0.0f),
                 "dense::Matmul: a bias with alpha ", spec.alpha, " and beta ",
                 spec.beta);
  const bool empty =
      spec.batch == 0 || spec.m == 0 || spec.n == 0 || spec.k == 0;
  if (empty) return nullptr;
  const bool is_float32 = spec.operand_type == DType::kFloat32 &&
                          spec.result_type == DType::kFloat32;
  if (spec.half_partials) {
    return is_float32 ? create_half_matmul(spec) : nullptr;
  }
  // The same bits as attention's, whatever the type in memory.
  if (is_cut(spec)) return is_float32 ? create_batch_matmul(spec) : nullptr;
  if (auto matmul = create_tile_matmul(spec)) return matmul;
  if (!is_float32) return nullptr;
  if (auto matmul = create_short_matmul(spec)) return matmul;
#if defined(POPSIM_HAVE_ONEDNN)
  if (!available() || spec.alpha == 0.0f || spec.relu || spec.mask ||
      spec.update || !spec.a.plain(spec.m, spec.k) ||
      !spec.b.plain(spec.k, spec.n)) {
    return nullptr;
  }
  try {
    return create_matmul(spec);
  } catch (const dnnl::error&) {
    return nullptr;
  }
#else
  return nullptr;
#endif
}

bool Matmul::can_fuse(const MatmulSpec& spec) {
  return create(spec) != nullptr;
}

}  // namespace popsim::dense
