#include "ops/attention/head_operand.h"

namespace popsim::ops {

HeadInput::HeadInput(const OpView& op, size_t input, Workspace& workspace)
    : id_(op.input_id(input)),
      matrix_(matrices_of(op.input(input))),
      batch_stride_(matrix_.strides.batch),
      load_(load_floats(op.input(input).dtype)) {
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
  walk_.emplace(sizes, from);
  offset_ = workspace.add(sizeof(float) *
                          static_cast<size_t>(matrix_.rows * matrix_.columns));
}

const float* HeadInput::load(const RunContext& context, int64_t head,
                             char* workspace) const {
  const int64_t first = head * batch_stride_;
  if (!walk_) return context.data<const float>(id_) + first;
  auto* const buffer = reinterpret_cast<float*>(workspace + offset_);
  float* out = buffer;
  const void* source = context.data(id_);
  walk_->for_each_run(0, matrix_.rows * matrix_.columns,
                      [&](int64_t offset, int64_t stride, int64_t count) {
                        load_(source, first + offset, stride, count, out);
                        out += count;
                      });
  return buffer;
}

HeadOutput::HeadOutput(const OpView& op, size_t output, Workspace& workspace)
    : id_(op.output_id(output)),
      rows_(op.output(output).shape[1]),
      columns_(op.output(output).shape[2]),
      in_place_(op.output(output).dtype == DType::kFloat32),
      store_(store_floats(op.output(output).dtype)) {
  check_internal(op.output(output).contiguous(), op.op().kind, " '",
                 op.op().name, "': output ", output, " is not contiguous");
  if (in_place_) return;
  offset_ =
      workspace.add(sizeof(float) * static_cast<size_t>(rows_ * columns_));
}

float* HeadOutput::space(const RunContext& context, int64_t head, int64_t row,
                         char* workspace) const {
  if (in_place_) return context.data<float>(id_) + first(head, row);
  return reinterpret_cast<float*>(workspace + offset_) + row * columns_;
}

void HeadOutput::store(const RunContext& context, int64_t head, int64_t row,
                       int64_t num_rows, const char* workspace) const {
  if (in_place_) return;
  const auto* values = reinterpret_cast<const float*>(workspace + offset_);
  store_(values + row * columns_, false, context.data(id_), first(head, row),
         num_rows * columns_);
}

}  // namespace popsim::ops
