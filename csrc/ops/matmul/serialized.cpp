// Matrix products in slices, one after another: slices of the rows of a, of the
// columns of b, or of the axis that is summed over.
//
// The memory for a product besides its operands (operands widened to float32 or
// packed, the result before it is rounded) has the size of one slice. Results
// are written directly to their part of the output.
#include <algorithm>
#include <array>
#include <optional>

#include "dense/matmul.h"
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

// The sizes of a tensor that is one matrix or a batch of matrices.
int64_t rows_of(const Shape& shape) { return shape[shape.size() - 2]; }
int64_t columns_of(const Shape& shape) { return shape.back(); }
int64_t batch_of(const Shape& shape) {
  return shape.size() == 3 ? shape[0] : 1;
}

enum class Slices : int8_t { kRows, kColumns, kDepth };

Slices slices_of(const OpCall& op) {
  const auto& name = op.attribute<std::string>("slices");
  if (name == "rows") return Slices::kRows;
  return name == "columns" ? Slices::kColumns : Slices::kDepth;
}

int64_t factor_of(const OpCall& op) { return op.attribute<int64_t>("factor"); }

// The axis of an operand that is divided, counted from the last one; empty if
// the operand stays whole.
std::optional<size_t> cut_axis(Slices slices, size_t operand) {
  constexpr size_t rows = 1;
  constexpr size_t columns = 0;
  switch (slices) {
    case Slices::kRows:
      return operand == kA ? std::optional(rows) : std::nullopt;
    case Slices::kColumns:
      return operand == kB ? std::optional(columns) : std::nullopt;
    case Slices::kDepth:
      break;
  }
  return operand == kA ? columns : rows;
}

// Loads one slice at a time as float32 matrices, in place or converted.
class SlicedOperand {
 public:
  SlicedOperand(const OpView& op, size_t input, Workspace& workspace)
      : id_(op.input_id(input)) {
    graph::Tensor slice = op.input(input);
    if (const auto from_last = cut_axis(slices_of(op), input)) {
      const size_t axis = slice.shape.size() - 1 - *from_last;
      slice.shape[axis] /= factor_of(op);
      step_ = slice.shape[axis] * slice.strides[axis];
    }
    matrices_ = matrices_of(slice);
    if (slice.dtype == DType::kFloat32 && is_plain(matrices_)) return;
    const Shape shape{matrices_.batch, matrices_.rows, matrices_.columns};
    dense::MatrixStrides& from = matrices_.strides;
    gather_.emplace(slice.dtype, shape,
                    Strides{from.batch, from.row, from.column});
    from = {matrices_.batch == 1 ? 0 : matrices_.rows * matrices_.columns,
            matrices_.columns, 1};
    normalise(matrices_);
    numel_ = num_elements(shape);
    offset_ = workspace.add(static_cast<size_t>(numel_) * sizeof(float));
  }

  // The layout of a slice in the memory that load() returns.
  [[nodiscard]] const Matrices& matrices() const { return matrices_; }
  // Call it for the slices in order: an operand that is not sliced is converted
  // only once, with the first slice.
  [[nodiscard]] const float* load(const RunContext& context, char* workspace,
                                  int64_t slice) const {
    if (!gather_) return context.data<const float>(id_) + slice * step_;
    auto* out = reinterpret_cast<float*>(workspace + offset_);
    if (slice > 0 && step_ == 0) return out;
    const void* source = context.data(id_);
    const threads::Shares shares(threads::elements(numel_), numel_);
    shares.run([&](int64_t /*share*/, threads::Range range) {
      gather_->read(source, range.begin, range.size(), out + range.begin,
                    slice * step_);
    });
    return out;
  }

 private:
  graph::TensorId id_;
  int64_t step_ = 0;  // elements from one slice to the next; 0: not sliced
  Matrices matrices_;
  std::optional<FloatGather> gather_;
  int64_t numel_ = 0;
  size_t offset_ = 0;  // of the converted slice
};

// The output that the results of slices are written to.
class SlicedOutput {
 public:
  SlicedOutput(const OpView& op, Workspace& workspace)
      : id_(op.output_id(0)),
        slices_(slices_of(op)),
        dtype_(op.output(0).dtype),
        batch_(batch_of(op.output(0).shape)),
        rows_(rows_of(op.output(0).shape)),
        columns_(columns_of(op.output(0).shape)),
        slice_rows_(slices_ == Slices::kRows ? rows_ / factor_of(op) : rows_),
        slice_columns_(slices_ == Slices::kColumns ? columns_ / factor_of(op)
                                                   : columns_),
        adds_rounded_(slices_ == Slices::kDepth && dtype_ != DType::kFloat32 &&
                      !op.attribute<bool>("wide_sums")),
        in_place_(dtype_ == DType::kFloat32 &&
                  (slices_ == Slices::kDepth ||
                   (slices_ == Slices::kRows && batch_ == 1))),
        load_(load_floats(dtype_)),
        store_(store_floats(dtype_)) {
    if (!in_place_) {
      const int64_t numel = batch_ * slice_rows_ * slice_columns_;
      offset_ = workspace.add(static_cast<size_t>(numel) * sizeof(float));
    }
  }

  // Whether the product of a slice is added to the contents of space().
  [[nodiscard]] bool adds(int64_t slice) const {
    return slices_ == Slices::kDepth && slice > 0 && !adds_rounded_;
  }
  // The memory in which a slice's product is computed.
  [[nodiscard]] float* space(const RunContext& context, char* workspace,
                             int64_t slice) const {
    if (!in_place_) return reinterpret_cast<float*>(workspace + offset_);
    const int64_t first =
        slices_ == Slices::kRows ? slice * slice_rows_ * columns_ : 0;
    return context.data<float>(id_) + first;
  }
  // Stores the contents of space() after the product of a slice.
  void store(const RunContext& context, const float* values, int64_t slice,
             bool last) const {
    const bool more_to_add = slices_ == Slices::kDepth && !adds_rounded_;
    if (in_place_ || (more_to_add && !last)) return;
    void* out = context.data(id_);
    const int64_t num_rows = batch_ * slice_rows_;
    const threads::Shares shares(threads::elements(num_rows * slice_columns_),
                                 num_rows);
    shares.run([&](int64_t /*share*/, threads::Range range) {
      for (int64_t row = range.begin; row < range.end; ++row) {
        const float* from = values + row * slice_columns_;
        const int64_t to = position(row, slice);
        if (adds_rounded_ && slice > 0) {
          add_rounded(from, slice_columns_, out, to);
        } else {
          store_(from, /*uniform=*/false, out, to, slice_columns_);
        }
      }
    });
  }

 private:
  static constexpr int64_t kChunk = 128;

  // The index in the output at which a row of a slice begins.
  [[nodiscard]] int64_t position(int64_t row, int64_t slice) const {
    const int64_t matrix = row / slice_rows_;
    int64_t in_matrix = row % slice_rows_;
    int64_t column = 0;
    if (slices_ == Slices::kRows) in_matrix += slice * slice_rows_;
    if (slices_ == Slices::kColumns) column = slice * slice_columns_;
    return (matrix * rows_ + in_matrix) * columns_ + column;
  }

  // Rounds a slice's sums to the dtype of the output, adds them to the output's
  // values, and rounds the results again.
  void add_rounded(const float* values, int64_t count, void* out,
                   int64_t to) const {
    std::array<uint16_t, kChunk> rounded{};
    std::array<float, kChunk> slice{};
    std::array<float, kChunk> sums{};
    for (int64_t i = 0; i < count; i += kChunk) {
      const int64_t n = std::min(kChunk, count - i);
      store_(values + i, /*uniform=*/false, rounded.data(), 0, n);
      load_(rounded.data(), 0, 1, n, slice.data());
      load_(out, to + i, 1, n, sums.data());
      for (size_t j = 0; j < static_cast<size_t>(n); ++j) sums[j] += slice[j];
      store_(sums.data(), /*uniform=*/false, out, to + i, n);
    }
  }

  graph::TensorId id_;
  Slices slices_;
  DType dtype_;
  int64_t batch_;
  int64_t rows_;
  int64_t columns_;
  int64_t slice_rows_;
  int64_t slice_columns_;
  bool adds_rounded_;
  bool in_place_;
  LoadFloats load_;
  StoreFloats store_;
  size_t offset_ = 0;
};

class SerializedMatmul final : public Kernel {
 public:
  explicit SerializedMatmul(const OpView& op)
      : factor_(factor_of(op)),
        a_(op, kA, workspace_),
        b_(op, kB, workspace_),
        out_(op, workspace_) {
    const Matrices& a = a_.matrices();
    const Matrices& b = b_.matrices();
    dense::MatmulSpec spec{.batch = batch_of(op.output(0).shape),
                           .m = a.rows,
                           .n = b.columns,
                           .k = a.columns,
                           .a = a.strides,
                           .b = b.strides,
                           .significant_bits = std::max(
                               significant_bits_in(op, op.input(kA).dtype),
                               significant_bits_in(op, op.input(kB).dtype)),
                           .half_partials = has_half_partials(op)};
    product_ = create(op, spec);
    size_t bytes = product_->workspace_bytes();
    if (out_.adds(1)) {
      spec.beta = 1.0f;
      sum_ = create(op, spec);
      bytes = std::max(bytes, sum_->workspace_bytes());
    }
    offset_ = workspace_.add(bytes);
  }

  void run(const RunContext& context) override {
    char* workspace = workspace_.memory();
    for (int64_t slice = 0; slice < factor_; ++slice) {
      float* out = out_.space(context, workspace, slice);
      dense::Matmul& product = out_.adds(slice) ? *sum_ : *product_;
      product.run(a_.load(context, workspace, slice),
                  b_.load(context, workspace, slice), nullptr, out,
                  workspace + offset_);
      out_.store(context, out, slice, slice + 1 == factor_);
    }
  }

 private:
  static std::unique_ptr<dense::Matmul> create(const OpView& op,
                                               const dense::MatmulSpec& spec) {
    auto product = dense::create_matmul(spec);
    check_internal(product != nullptr, "serialized_matmul '", op.op().name,
                   "': no code for this product");
    return product;
  }

  int64_t factor_;
  Workspace workspace_;
  SlicedOperand a_;
  SlicedOperand b_;
  SlicedOutput out_;
  std::unique_ptr<dense::Matmul> product_;
  // The product that adds to the memory's contents.
  std::unique_ptr<dense::Matmul> sum_;
  size_t offset_ = 0;
};

std::vector<TensorType> product_type(const OpCall& op) {
  const Shape& a = op.input(kA).shape;
  const Shape& b = op.input(kB).shape;
  op.require(a.size() == 2 || a.size() == 3, "operands have two or three axes");
  op.require_rank(kB, a.size());
  op.require(op.input(kA).numel() > 0 && op.input(kB).numel() > 0,
             "operands are not empty");
  op.require(columns_of(a) == rows_of(b),
             "a has as many columns as b has rows");
  op.require(batch_of(a) == batch_of(b), "the batch sizes are equal");
  const Slices slices = slices_of(op);
  const int64_t cut = slices == Slices::kRows      ? rows_of(a)
                      : slices == Slices::kColumns ? columns_of(b)
                                                   : columns_of(a);
  op.require(cut % factor_of(op) == 0, "the factor divides ", cut);
  check_precision(op);
  op.require(!op.has_attribute("partials") || !op.attribute<bool>("wide_sums"),
             "partials and wide_sums are not given together");
  Shape shape = a;
  shape.back() = columns_of(b);
  return {{dtype_from_name(op.attribute<std::string>("dtype")), shape}};
}

std::unique_ptr<Kernel> prepare(const OpView& op) {
  return std::make_unique<SerializedMatmul>(op);
}

std::vector<graph::Work> product_work(const OpView& op) {
  const Shape& out = op.output(0).shape;
  graph::Product slice{.batch = batch_of(out),
                       .rows = rows_of(out),
                       .columns = columns_of(out),
                       .depth = columns_of(op.input(kA).shape),
                       .dtype = op.input(kA).dtype};
  const int64_t factor = factor_of(op);
  switch (slices_of(op)) {
    case Slices::kRows:
      slice.rows /= factor;
      break;
    case Slices::kColumns:
      slice.columns /= factor;
      break;
    case Slices::kDepth:
      slice.depth /= factor;
      break;
  }
  return std::vector<graph::Work>(static_cast<size_t>(factor), slice);
}

}  // namespace

extern const OpDef kSerializedMatmul{
    .name = "serialized_matmul",
    .schema =
        "serialized_matmul(Tensor{float32, float16} a, "
        "Tensor{float32, float16} b, *, str{rows, columns, depth} slices, "
        "int{1..} factor, bool wide_sums, dtype{float32, float16} dtype, "
        "str{half}? partials, str{bf16, tf32}? precision) -> Tensor",
    .family = "matmul",
    .shape = product_type,
    .prepare = prepare,
    .work = product_work,
    .layer = true,
};

}  // namespace popsim::ops
