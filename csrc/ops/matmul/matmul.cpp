// Matrix products.
//
// csrc/dense computes floating-point types up to 32 bits with float32 sums. It
// reads 16-bit operands in place or widens them, and rounds the result once,
// when it is written, as an IPU with float32 partials does. With half partials,
// float16 operands are added up in float16. ATen computes all other types.
#include "dense/matmul.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <optional>
#include <utility>

#include "ops/op_def.h"
#include "ops/operands/float_operand.h"
#include "ops/operands/matrices.h"
#include "ops/operands/partials.h"
#include "ops/operands/precision.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

constexpr size_t kA = 0;
constexpr size_t kB = 1;
constexpr size_t kBias = 2;
constexpr size_t kMask = 3;

// relu is the only activation.
bool has_relu(const OpView& op) { return op.has_attribute("activation"); }

// A batch of matrices times one matrix is one tall matrix times that matrix.
bool is_one_tall_matrix(const Matrices& a) {
  return a.strides.batch == a.rows * a.strides.row;
}

// The form of the operands that the product reads.
enum class Reading : int8_t {
  kInPlace,  // the operands in place, including 16-bit types
  kWidened,  // float32, in place if oneDNN can use the strides
  kCopied    // contiguous float32
};

class Operand {
 public:
  Operand(graph::TensorId id, DType dtype, const Matrices& m, Reading reading,
          Workspace& workspace)
      : id_(id), strides_(m.strides) {
    if (reading == Reading::kInPlace) return;
    const bool plain = reading == Reading::kWidened && is_plain(m);
    const bool transposed = plain && !is_row_major(m);
    const std::vector<size_t> order = transposed ? std::vector<size_t>{0, 2, 1}
                                                 : std::vector<size_t>{0, 1, 2};
    const FloatView view{id,
                         dtype,
                         {m.batch, m.rows, m.columns},
                         {m.strides.batch, m.strides.row, m.strides.column}};
    floats_.emplace(view, order, plain, workspace);
    const Strides& s = floats_->strides();
    strides_ = {m.batch == 1 ? 0 : s[0], s[1], s[2]};
  }

  // The layout of the matrix in the memory that load() returns.
  [[nodiscard]] const dense::MatrixStrides& strides() const { return strides_; }
  [[nodiscard]] const void* load(const RunContext& context,
                                 char* workspace) const {
    return floats_ ? floats_->load(context, workspace) : context.data(id_);
  }

 private:
  graph::TensorId id_;
  dense::MatrixStrides strides_;
  std::optional<FloatInput> floats_;
};

FloatView bias_view(const OpView& op, const Shape& wanted) {
  const graph::Tensor& bias = op.input(kBias);
  return {op.input_id(kBias), bias.dtype, wanted,
          broadcast_strides(bias.shape, bias.strides, wanted)};
}

class DenseMatmul final : public Kernel {
 public:
  // Null if csrc/dense cannot compute the product.
  static std::unique_ptr<DenseMatmul> create(const OpView& op, Reading reading);

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    float* sums = out_ ? out_->buffer(context, workspace) : nullptr;
    if (initial_) initial_->write(context, sums);
    const float* mask = mask_ ? mask_->load(context, workspace) : nullptr;
    matmul_->run({.a = a_.load(context, workspace),
                  .b = b_.load(context, workspace),
                  .bias = bias_ ? bias_->load(context, workspace) : nullptr,
                  .mask = mask,
                  .c = out_ ? sums : context.data(out_id_),
                  .workspace = workspace + matmul_offset_});
    if (close_after_) close(mask_ ? mask : sums, sums);
    if (out_) out_->store(context, workspace);
  }

 private:
  DenseMatmul(const OpView& op, const Matrices& a, const Matrices& b,
              Reading of_a, Reading of_b)
      : a_(op.input_id(kA), op.input(kA).dtype, a, of_a, workspace_),
        b_(op.input_id(kB), op.input(kB).dtype, b, of_b, workspace_),
        out_id_(op.output_id(0)),
        numel_(op.output(0).numel()) {
    if (of_b != Reading::kInPlace) {
      out_.emplace(out_id_, op.output(0), workspace_);
    }
    if (op.has_input(kMask)) {
      mask_.emplace(op.input_id(kMask), op.input(kMask), workspace_);
    }
  }

  // Sets values to zero where `gate` is zero. oneDNN's ReLU would turn NaN into
  // zero.
  void close(const float* gate, float* out) const {
    const threads::Shares shares(threads::elements(numel_), numel_);
    shares.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        out[i] = gate[i] <= 0.0f ? 0.0f : out[i];
      }
    });
  }

  // If the product is one of two matrices, it adds a bias per column itself.
  // Any other bias is written to the output before the product is added to it.
  void plan_bias(const OpView& op, dense::MatmulSpec& spec) {
    const auto beta = static_cast<float>(op.attribute<double>("beta"));
    if (!op.has_input(kBias) || beta == 0.0f) return;
    FloatView view = bias_view(op, op.output(0).shape);
    bool per_column = spec.batch == 1;
    for (size_t i = 0; i + 1 < view.strides.size(); ++i) {
      per_column = per_column && view.strides[i] == 0;
    }
    if (per_column && beta == 1.0f && spec.alpha == 1.0f) {
      spec.bias = true;
      view.shape = {spec.n};
      view.strides = {view.strides.back()};
      bias_.emplace(view, std::vector<size_t>{0}, false, workspace_);
    } else {
      spec.beta = beta;
      initial_.emplace(view);
    }
  }

  // Returns whether the product exists.
  bool plan_product(dense::MatmulSpec& spec) {
    if (!out_ && initial_) return false;
    matmul_ = dense::create_matmul(spec);
    if (matmul_ == nullptr && out_ && (spec.relu || spec.mask)) {
      spec.relu = spec.mask = false;
      close_after_ = true;
      matmul_ = dense::create_matmul(spec);
    }
    if (matmul_ == nullptr) return false;
    matmul_offset_ = workspace_.add(matmul_->workspace_bytes());
    return true;
  }

  Workspace workspace_;
  Operand a_;
  Operand b_;
  graph::TensorId out_id_;
  // Absent if the product writes the tensor itself.
  std::optional<FloatOutput> out_;
  int64_t numel_;
  std::optional<FloatInput> mask_;
  bool close_after_ = false;  // the product itself applies no relu and no mask
  std::optional<FloatInput> bias_;
  std::optional<FloatBroadcast> initial_;
  std::unique_ptr<dense::Matmul> matmul_;
  size_t matmul_offset_ = 0;
};

std::unique_ptr<DenseMatmul> DenseMatmul::create(const OpView& op,
                                                 Reading reading) {
  Matrices a = matrices_of(op.input(kA));
  const Matrices b = matrices_of(op.input(kB));
  const bool in_place = reading == Reading::kInPlace;
  const bool fold = b.batch == 1 && a.batch > 1;
  // One copy is cheaper than many small products.
  const bool copy = fold && (!is_one_tall_matrix(a) || !is_row_major(a));
  if (in_place && (copy || !is_plain(a) || !is_plain(b))) return nullptr;
  auto kernel = std::unique_ptr<DenseMatmul>(
      new DenseMatmul(op, a, b, copy ? Reading::kCopied : reading, reading));
  if (fold) {
    a.rows *= a.batch;
    a.batch = 1;
  }
  const DType dtype = op.input(kA).dtype;
  const DType memory = in_place ? dtype : DType::kFloat32;
  dense::MatmulSpec spec{
      .batch = op.output(0).numel() / (a.rows * b.columns),
      .m = a.rows,
      .n = b.columns,
      .k = a.columns,
      .a = kernel->a_.strides(),
      .b = kernel->b_.strides(),
      .alpha = static_cast<float>(op.attribute<double>("alpha")),
      .operand_type = memory,
      .result_type = memory,
      .significant_bits = significant_bits_in(op, dtype),
      .half_partials = has_half_partials(op),
      .relu = has_relu(op),
      .mask = op.has_input(kMask)};
  if (a.batch == 1) spec.a.batch = 0;
  kernel->plan_bias(op, spec);
  return kernel->plan_product(spec) ? std::move(kernel) : nullptr;
}

class AtenMatmul final : public Kernel {
 public:
  explicit AtenMatmul(const OpView& op)
      : a_(op.input_id(kA)),
        b_(op.input_id(kB)),
        out_(op.output_id(0)),
        alpha_(op.attribute<double>("alpha")),
        beta_(op.attribute<double>("beta")),
        relu_(has_relu(op)),
        widen_(computes_in_float32(op.output(0).dtype)) {
    if (op.has_input(kBias) && beta_ != 0.0) bias_ = op.input_id(kBias);
    if (op.has_input(kMask)) mask_ = op.input_id(kMask);
  }

  std::vector<graph::TensorId> at_tensors() const override {
    std::vector<graph::TensorId> ids{a_, b_, out_};
    if (bias_ != graph::kNoTensor) ids.push_back(bias_);
    if (mask_ != graph::kNoTensor) ids.push_back(mask_);
    return ids;
  }

  void run(const RunContext& context) override {
    at::Tensor result;
    threads::run_alone([&] { result = product(context); });
    if (bias_ != graph::kNoTensor) {
      const at::Tensor bias = operand(context, bias_);
      result.add_(beta_ == 1.0 ? bias : bias.mul(beta_));
    }
    if (relu_) result.relu_();
    if (mask_ != graph::kNoTensor) {
      result.masked_fill_(context.tensor(mask_).le(0), 0);
    }
    context.tensor(out_).copy_(result);
  }

 private:
  at::Tensor operand(const RunContext& context, graph::TensorId id) const {
    const at::Tensor& tensor = context.tensor(id);
    return widen_ ? tensor.to(at::kFloat) : tensor;
  }

  at::Tensor product(const RunContext& context) const {
    // Alpha is zero, so the operands' values do not matter, not even NaN.
    if (alpha_ == 0.0) return at::zeros_like(operand(context, out_));
    const at::Tensor result =
        at::matmul(operand(context, a_), operand(context, b_));
    return alpha_ == 1.0 ? result : result.mul(alpha_);
  }

  graph::TensorId a_;
  graph::TensorId b_;
  graph::TensorId bias_ = graph::kNoTensor;
  graph::TensorId mask_ = graph::kNoTensor;
  graph::TensorId out_;
  double alpha_;
  double beta_;
  bool relu_;
  bool widen_;
};

std::vector<TensorType> product_type(const OpCall& op) {
  const graph::Tensor& a = op.input(kA);
  const graph::Tensor& b = op.input(kB);
  const auto check = [&](bool condition, std::string_view rule) {
    op.require(condition, rule);
  };
  const auto is_matrix = [](const graph::Tensor& t) {
    return t.shape.size() == 2 || t.shape.size() == 3;
  };
  check(is_matrix(a) && is_matrix(b), "operands have two or three axes");
  check(a.dtype == b.dtype, "operands have the same dtype");
  check_precision(op);
  check(a.shape.back() == b.shape[b.shape.size() - 2],
        "a has as many columns as b has rows");
  Shape shape{a.shape[a.shape.size() - 2], b.shape.back()};
  if (a.shape.size() == 3 || b.shape.size() == 3) {
    const int64_t batch_a = a.shape.size() == 3 ? a.shape[0] : 1;
    const int64_t batch_b = b.shape.size() == 3 ? b.shape[0] : 1;
    check(batch_a == batch_b || batch_a == 1 || batch_b == 1,
          "the batch sizes are equal or one of them is 1");
    shape.insert(shape.begin(), batch_a == 1 ? batch_b : batch_a);
  }
  if (op.has_input(kBias)) {
    check(op.input(kBias).dtype == a.dtype,
          "the bias has the dtype of the operands");
    op.require_broadcasts(kBias, shape);
  }
  if (op.has_input(kMask)) {
    check(op.input(kMask).dtype == a.dtype && op.input(kMask).shape == shape,
          "the mask has the dtype and shape of the product");
  }
  return {{a.dtype, shape}};
}

std::unique_ptr<Kernel> prepare(const OpView& op) {
  const graph::Tensor& out = op.output(0);
  const bool multiplies = op.attribute<double>("alpha") != 0.0 &&
                          out.numel() > 0 && op.input(kA).numel() > 0;
  if (computes_in_float32(out.dtype) && multiplies && out.contiguous()) {
    for (const Reading reading :
         {Reading::kInPlace, Reading::kWidened, Reading::kCopied}) {
      if (auto kernel = DenseMatmul::create(op, reading)) return kernel;
    }
  }
  // Without multiplications there are no partial sums.
  check_internal(!has_half_partials(op) || !multiplies, "matmul '",
                 op.op().name, "': no kernel with half partials");
  return std::make_unique<AtenMatmul>(op);
}

std::vector<graph::Work> product_work(const OpView& op) {
  const graph::Tensor& a = op.input(kA);
  const Shape& out = op.output(0).shape;
  return {graph::Product{.batch = out.size() == 3 ? out[0] : 1,
                         .rows = out[out.size() - 2],
                         .columns = out.back(),
                         .depth = a.shape.back(),
                         .dtype = a.dtype}};
}

}  // namespace

extern const OpDef kMatmul{
    .name = "matmul",
    .schema =
        "matmul(Tensor a, Tensor b, Tensor? bias, Tensor? mask, *, "
        "float alpha=1, float beta=1, str{relu}? activation, "
        "str{half}? partials, str{bf16, tf32}? precision) -> Tensor",
    .family = "matmul",
    .shape = product_type,
    .prepare = prepare,
    .work = product_work,
    .outputs = OutputLayout::kAny,
    .layer = true,
    .only_overflows = true,
};

}  // namespace popsim::ops
