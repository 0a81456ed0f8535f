#include "ops/attention/head_operand.h"

namespace popsim::ops {

HeadInput::HeadInput(const OpView& op, size_t input, Workspace& workspace)
    : id_(op.input_id(input)),
      matrix_(matrices_of(op.input(input))),
      batch_stride_(matrix_.strides.batch) {
  const graph::Tensor& tensor = op.input(input);
  check_internal(tensor.shape.size() == 3 && matrix_.batch > 1, op.op().kind,
                 " '", op.op().name, "': input ", input,
                 " is not a batch of matrices");
  const bool plain = is_plain(matrix_);
  if (plain && tensor.dtype == DType::kFloat32) return;
  Shape sizes{matrix_.rows, matrix_.columns};
  Strides from{matrix_.strides.row, matrix_.strides.column};
  if (plain && !is_row_major(matrix_)) {
    std::swap(sizes[0], sizes[1]);
    std::swap(from[0], from[1]);
    matrix_.strides = {.row = 1, .column = matrix_.rows};
  } else {
    matrix_.strides = {.row = matrix_.columns, .column = 1};
  }
  gather_.emplace(tensor.dtype, sizes, from);
  offset_ = workspace.add(sizeof(float) *
                          static_cast<size_t>(matrix_.rows * matrix_.columns));
}

const float* HeadInput::load(const RunContext& context, int64_t head,
                             char* workspace) const {
  const int64_t first = head * batch_stride_;
  if (!gather_) return context.data<const float>(id_) + first;
  auto* const buffer = reinterpret_cast<float*>(workspace + offset_);
  gather_->read(context.data(id_), 0, matrix_.rows * matrix_.columns, buffer,
                first);
  return buffer;
}

HeadOutput::HeadOutput(const OpView& op, size_t output, Workspace& workspace)
    : writer_(op, output),
      rows_(op.output(output).shape[1]),
      columns_(op.output(output).shape[2]) {
  if (writer_.in_place()) return;
  offset_ =
      workspace.add(sizeof(float) * static_cast<size_t>(rows_ * columns_));
}

float* HeadOutput::space(const RunContext& context, int64_t head, int64_t row,
                         char* workspace) const {
  float* buffer = nullptr;
  if (!writer_.in_place()) {
    buffer = reinterpret_cast<float*>(workspace + offset_) + row * columns_;
  }
  return writer_.space(context, first(head, row), buffer);
}

void HeadOutput::store(const RunContext& context, int64_t head, int64_t row,
                       int64_t num_rows, const char* workspace) const {
  if (writer_.in_place()) return;
  const auto* values = reinterpret_cast<const float*>(workspace + offset_);
  writer_.write(context, first(head, row), num_rows * columns_,
                values + row * columns_);
}

}  // namespace popsim::ops
