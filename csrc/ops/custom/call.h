// The data that the functions of a user's operator get: operands and attributes
// of an op in the form of popsim_custom_op.h.
#pragma once

#include <string>
#include <vector>

#include "ops/custom/library.h"
#include "ops/op_def.h"

namespace popsim::ops::custom {

class Call : public popsim_call {
 public:
  // Takes the first `num_inputs` inputs, and the outputs if there are any.
  Call(const OpCall& op, size_t num_inputs,
       const std::vector<graph::TensorId>& outputs);
  // (It contains pointers to its own members.)
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Throws UserError with the operator's name and the function's message,
  // unless `returned` is 0.
  void check(int returned, const char* function);
  // The outputs that the shape rule has declared.
  [[nodiscard]] const std::vector<TensorType>& declared() const {
    return declared_;
  }
  void set_data(size_t input_or_output, void* data) {
    operands_[input_or_output].data = data;
  }

 private:
  struct Attribute {
    std::string name;
    int32_t type = POPSIM_INTS;
    bool is_list = false;
    size_t begin = 0;
    size_t count = 0;
  };

  void add_operand(const graph::Tensor& tensor);
  void read_attributes(const OpCall& op);
  Attribute read_layout(const OpCall& op, const std::string& text) const;
  static void declare_output(popsim_call* call, int32_t dtype, int32_t rank,
                             const int64_t* shape);
  static void keep_message(popsim_call* call, const char* message);
  static void share_work(popsim_call* call, int64_t units,
                         int64_t numbers_per_unit,
                         void (*body)(void* data, int64_t begin, int64_t end),
                         void* data);

  std::string operator_;
  std::string message_;
  std::vector<TensorType> declared_;
  std::vector<Shape> shapes_;
  std::vector<popsim_tensor> operands_;
  std::vector<Attribute> layouts_;
  std::vector<popsim_attribute> attributes_;
  std::vector<int64_t> ints_;
  std::vector<double> floats_;
  std::vector<std::string> strings_;
  std::vector<const char*> texts_;
};

// The operator that an op names. Throws InternalError if the operator does not
// exist.
[[nodiscard]] const popsim_custom_op& operator_of(const OpCall& op);

// The types of the outputs according to the operator's shape rule; unknown
// types if it has no shape rule. Throws UserError if the rule refuses the
// inputs.
[[nodiscard]] std::vector<TensorType> types_of(const OpCall& op);

}  // namespace popsim::ops::custom
