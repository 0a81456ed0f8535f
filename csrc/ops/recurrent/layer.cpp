#include "ops/recurrent/layer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>

#include <algorithm>

#include "base/numbers.h"
#include "dense/matmul.h"
#include "ops/operands/partials.h"
#include "ops/operands/precision.h"
#include "threads/tasks.h"

namespace popsim::ops::recurrent {
namespace {

at::Tensor matrix(const float* data, int64_t rows, int64_t columns,
                  int64_t row_stride, int64_t column_stride) {
  return at::from_blob(const_cast<float*>(data), {rows, columns},
                       {row_stride, column_stride}, at::kFloat);
}

void run_aten(const dense::MatmulSpec& spec, const float* a, const float* b,
              const float* bias, float* c) {
  at::Tensor product;
  threads::run_alone([&] {
    product = at::matmul(matrix(a, spec.m, spec.k, spec.a.row, spec.a.column),
                         matrix(b, spec.k, spec.n, spec.b.row, spec.b.column));
  });
  if (bias != nullptr) product.add_(matrix(bias, 1, spec.n, spec.n, 1));
  matrix(c, spec.m, spec.n, spec.n, 1).copy_(product);
}

}  // namespace

int64_t num_gates(std::string_view mode) {
  if (mode == "lstm") return Lstm::kGates;
  if (mode == "gru") return Gru::kGates;
  return 1;
}

Dims dims_of(const OpCall& op, const Operands& operands) {
  const graph::Tensor& x = op.input(operands.x);
  const Shape& input = op.input(operands.weight_input).shape;
  const Shape& hidden = op.input(operands.weight_hidden).shape;
  const int64_t gates = num_gates(op.attribute<std::string>("mode"));
  op.require(x.shape.size() == 3 && x.numel() > 0 && input.size() == 2 &&
                 hidden.size() == 2 && hidden[1] > 0 &&
                 input[0] == gates * hidden[1] && hidden[0] == input[0] &&
                 input[1] == x.shape[2],
             "x and the weights have the shapes of a recurrent layer");
  op.require_one_dtype();
  check_precision(op);
  return {.dtype = x.dtype,
          .steps = x.shape[0],
          .batch = x.shape[1],
          .inputs = x.shape[2],
          .hidden = hidden[1],
          .gates = gates,
          .reverse = op.attribute<bool>("reverse"),
          .half_partials = has_half_partials(op),
          // h and the gates are float32, whatever the dtype in memory.
          .significant_bits = significant_bits_in(op, DType::kFloat32)};
}

Kept kept_by(const OpCall& op) {
  return with_cell(op, [](auto cell) -> Kept {
    using Cell = decltype(cell);
    return {.gates = Cell::kGates > 1,
            .state = Cell::kHasState,
            .cell_state = std::is_same_v<Cell, Lstm>};
  });
}

std::vector<graph::Work> layer_work(const Dims& dims) {
  constexpr int64_t kCellCost = 20;
  return {graph::Product{1, dims.rows(), dims.gate_columns(), dims.inputs,
                         dims.dtype},
          graph::Product{dims.steps, dims.batch, dims.gate_columns(),
                         dims.hidden, dims.dtype},
          graph::Elementwise{dims.gate_floats(), kCellCost}};
}

void check_input(const OpCall& op, size_t input, bool wanted,
                 const Shape& shape) {
  op.require(op.has_input(input) == wanted, "input ", input,
             wanted ? " is present" : " is left out");
  if (wanted) op.require_shape(input, shape);
}

void column_sums(const float* matrix, int64_t rows, int64_t columns,
                 float* out) {
  const threads::Shares shares(threads::elements(rows * columns),
                               ceil_div(columns, kLanes));
  shares.run([&](int64_t /*share*/, threads::Range vectors) {
    const int64_t first = vectors.begin * kLanes;
    const int64_t last = std::min(columns, vectors.end * kLanes);
    std::fill(out + first, out + last, 0.0f);
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = matrix + row * columns;
      for (int64_t i = first; i < last; ++i) out[i] += values[i];
    }
  });
}

Product::Product(const dense::MatmulSpec& spec, Workspace& workspace)
    : spec_(spec), matmul_(dense::create_matmul(spec)) {
  if (matmul_) offset_ = workspace.add(matmul_->workspace_bytes());
}

void Product::run(const float* a, const float* b, const float* bias, float* c,
                  char* workspace) const {
  if (matmul_) {
    matmul_->run(a, b, bias, c, workspace + offset_);
  } else {
    run_aten(spec_, a, b, bias, c);
  }
}

}  // namespace popsim::ops::recurrent
