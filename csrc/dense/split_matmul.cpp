#include "dense/split_matmul.h"

#include "dense/split.h"

#if defined(POPSIM_HAVE_ONEDNN)
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "dense/onednn.h"

namespace popsim::dense {
namespace {

using dnnl::memory;

bool has_matrix_units() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
  return (isa & amx) == amx;
}

// Splitting costs time for each number of the operands and saves some for each
// multiplication: it pays where a number takes part in many. The units work on
// whole tiles; oneDNN pads others at a high price. Both bounds were measured on
// a Sapphire Rapids processor.
bool pays(const MatmulSpec& spec) {
  constexpr int64_t kTile = 32;
  constexpr int64_t kMinUses = 40;
  const int64_t uses = spec.m * spec.n / (spec.m + spec.n);
  return spec.significant_bits <= 11 && spec.k >= 2 * kTile &&
         spec.k % kTile == 0 && spec.n % kTile == 0 && uses >= kMinUses;
}

memory::desc bfloat16_desc(memory::dims sizes, bool last_axis_outer) {
  memory::dims strides = contiguous_strides(sizes);
  if (last_axis_outer) {
    const size_t rank = sizes.size();
    strides[rank - 2] = 1;
    strides[rank - 1] = sizes[rank - 2];
  }
  return {sizes, memory::data_type::bf16, strides};
}

class SplitMatmul final : public Matmul {
 public:
  SplitMatmul(const MatmulSpec& spec, std::unique_ptr<Matmul> exact)
      : spec_(spec),
        pairs_(part_pairs(spec.significant_bits)),
        b_depth_inner_(spec.b.column != 1),
        exact_(std::move(exact)),
        num_threads_(num_threads_for(1e12)),
        stream_(cpu()) {
    const ThreadScope scope(num_threads_);
    const int64_t depth = pairs_.count() * spec.k;
    const auto a = bfloat16_desc(dims(spec.batch, spec.m, depth), false);
    const auto b =
        bfloat16_desc(dims(b_batch(), depth, spec.n), b_depth_inner_);
    const memory::dims out = dims(spec.batch, spec.m, spec.n);
    const auto c = plain_desc(out, contiguous_strides(out));
    const dnnl::matmul::primitive_desc desc = describe(a, b, c);
    a_offset_ = plan_.add(a.get_size());
    b_offset_ = plan_.add(b.get_size());
    scratchpad_offset_ = plan_.add(desc.scratchpad_desc().get_size());
    exact_offset_ = plan_.add(exact_->workspace_bytes());
    bind(desc);
  }

  using Matmul::run;
  size_t workspace_bytes() const override { return plan_.bytes(); }

  void run(const MatmulOperands& operands) override {
    auto* workspace = static_cast<char*>(operands.workspace);
    auto* a = reinterpret_cast<uint16_t*>(workspace + a_offset_);
    auto* b = reinterpret_cast<uint16_t*>(workspace + b_offset_);
    if (!split(operands, a, b)) {
      MatmulOperands whole = operands;
      whole.workspace = workspace + exact_offset_;
      exact_->run(whole);
      return;
    }
    a_.set_data_handle(a);
    b_.set_data_handle(b);
    if (bias_) bias_.set_data_handle(const_cast<float*>(operands.bias));
    c_.set_data_handle(operands.c);
    scratchpad_.set_data_handle(workspace + scratchpad_offset_);
    const ThreadScope scope(num_threads_);
    step_->execute(stream_);
  }

 private:
  // A repeated matrix is split once.
  [[nodiscard]] int64_t b_batch() const {
    return spec_.b.batch == 0 ? 1 : spec_.batch;
  }

  [[nodiscard]] memory::dims dims(int64_t batch, int64_t rows,
                                  int64_t columns) const {
    if (spec_.batch == 1) return {rows, columns};
    return {batch, rows, columns};
  }

  [[nodiscard]] dnnl::matmul::primitive_desc describe(
      const memory::desc& a, const memory::desc& b,
      const memory::desc& c) const {
    dnnl::post_ops post_ops;
    if (spec_.beta != 0.0f) post_ops.append_sum(spec_.beta);
    dnnl::primitive_attr attributes = user_scratchpad();
    attributes.set_post_ops(post_ops);
    if (!spec_.bias) return {cpu(), a, b, c, attributes};
    const memory::dims sizes = dims(1, 1, spec_.n);
    const auto bias = plain_desc(sizes, contiguous_strides(sizes));
    return {cpu(), a, b, bias, c, attributes};
  }

  void bind(const dnnl::matmul::primitive_desc& desc) {
    a_ = unbound(desc.src_desc());
    b_ = unbound(desc.weights_desc());
    c_ = unbound(desc.dst_desc());
    scratchpad_ = unbound(desc.scratchpad_desc());
    std::vector<std::pair<int, memory>> arguments{
        {DNNL_ARG_SRC, a_},
        {DNNL_ARG_WEIGHTS, b_},
        {DNNL_ARG_DST, c_},
        {DNNL_ARG_SCRATCHPAD, scratchpad_}};
    if (spec_.bias) {
      bias_ = unbound(desc.bias_desc());
      arguments.emplace_back(DNNL_ARG_BIAS, bias_);
    }
    step_.emplace(dnnl::matmul(desc), arguments);
  }

  [[nodiscard]] bool split(const MatmulOperands& operands, uint16_t* a,
                           uint16_t* b) const {
    const SplitSource of_a{operands.a,    spec_.batch, spec_.m,       spec_.k,
                           spec_.a.batch, spec_.a.row, spec_.a.column};
    const SplitSource of_b{operands.b,    b_batch(),      spec_.n,    spec_.k,
                           spec_.b.batch, spec_.b.column, spec_.b.row};
    return split_depth_inner(of_a, pairs_.of_a, a) &&
           (b_depth_inner_ ? split_depth_inner(of_b, pairs_.of_b, b)
                           : split_depth_outer(of_b, pairs_.of_b, b));
  }

  MatmulSpec spec_;
  PartPairs pairs_;
  bool b_depth_inner_;
  std::unique_ptr<Matmul> exact_;
  int num_threads_;
  dnnl::stream stream_;
  WorkspacePlan plan_;
  size_t a_offset_ = 0;
  size_t b_offset_ = 0;
  size_t scratchpad_offset_ = 0;
  size_t exact_offset_ = 0;
  memory a_;
  memory b_;
  memory bias_;  // empty where the spec has none
  memory c_;
  memory scratchpad_;
  std::optional<Step> step_;
};

}  // namespace
}  // namespace popsim::dense
#endif

namespace popsim::dense {

std::unique_ptr<Matmul> create_split_matmul(const MatmulSpec& spec,
                                            std::unique_ptr<Matmul>& exact) {
#if defined(POPSIM_HAVE_ONEDNN)
  if (exact == nullptr || spec.alpha != 1.0f || !has_matrix_units() ||
      !pays(spec)) {
    return nullptr;
  }
  return std::make_unique<SplitMatmul>(spec, std::move(exact));
#else
  return nullptr;
#endif
}

}  // namespace popsim::dense
