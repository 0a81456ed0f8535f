// A call of an ATen operator as an `aten` op describes it: the boxed arguments
// that are known, and the places of the tensors.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "ops/op_def.h"

namespace popsim::ops {

class AtenCall {
 public:
  // kOut: the form that writes into given tensors; kFunctional: the form that
  // returns new tensors.
  enum class Form : int8_t { kOut, kFunctional };

  // Throws InternalError if the operator does not exist, if it changes its
  // inputs, or if its arguments do not match the op.
  AtenCall(const OpCall& op, Form form);

  [[nodiscard]] const c10::OperatorHandle& handle() const { return handle_; }
  [[nodiscard]] const std::optional<at::Generator>& generator() const {
    return generator_;
  }
  // The places of tensors that the op writes, in the order of its outputs.
  [[nodiscard]] const std::vector<size_t>& out_positions() const {
    return out_positions_;
  }
  // Fills in all arguments except those; tensor_of(i) returns the op's input i.
  template <typename TensorOf>
  void fill(std::vector<c10::IValue>& stack, const TensorOf& tensor_of) const;

 private:
  // A place in the stack for an input of the op.
  struct TensorSlot {
    size_t position;
    size_t input;
  };
  struct TensorListSlot {
    size_t position;
    std::vector<std::optional<size_t>> inputs;
    bool optional_elements;
  };

  void bind(const OpCall& op, const graph::Argument& value,
            const c10::Argument& argument);
  void bind_list(const OpCall& op, const graph::TensorListArgument& list,
                 const c10::Argument& argument);
  template <typename TensorOf>
  [[nodiscard]] static c10::IValue boxed_list(const TensorListSlot& slot,
                                              const TensorOf& tensor_of);

  c10::OperatorHandle handle_;
  std::optional<at::Generator> generator_;
  std::vector<c10::IValue> template_;
  std::vector<TensorSlot> tensors_;
  std::vector<TensorListSlot> tensor_lists_;
  std::vector<size_t> out_positions_;
};

template <typename TensorOf>
void AtenCall::fill(std::vector<c10::IValue>& stack,
                    const TensorOf& tensor_of) const {
  stack = template_;
  for (const TensorSlot& slot : tensors_) {
    stack[slot.position] = tensor_of(slot.input);
  }
  for (const TensorListSlot& slot : tensor_lists_) {
    stack[slot.position] = boxed_list(slot, tensor_of);
  }
}

template <typename TensorOf>
c10::IValue AtenCall::boxed_list(const TensorListSlot& slot,
                                 const TensorOf& tensor_of) {
  if (!slot.optional_elements) {
    c10::List<at::Tensor> list;
    for (const auto& input : slot.inputs) list.push_back(tensor_of(*input));
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& input : slot.inputs) {
    if (input) {
      list.push_back(tensor_of(*input));
    } else {
      list.push_back(std::nullopt);
    }
  }
  return list;
}

// Visits the results of a call, with lists flattened.
template <typename Visit>
void for_each_result(const std::vector<c10::IValue>& stack,
                     const Visit& visit) {
  for (const c10::IValue& value : stack) {
    if (value.isTensorList()) {
      for (const at::Tensor& element : value.toTensorVector()) visit(element);
    } else {
      visit(value.toTensor());
    }
  }
}

// The types of the operator's results, from a run on tensors without data. They
// are unknown if PyTorch cannot run the operator without data; then the results
// are checked during a run.
[[nodiscard]] std::vector<TensorType> infer_aten_types(const OpCall& op);

}  // namespace popsim::ops
