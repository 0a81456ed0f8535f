// A call of an ATen operator as an `aten` op describes it: the arguments that
// are known, boxed, and the places that tensors go into.
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
  // Into the tensors that it writes, or the one that returns new ones.
  enum class Form : int8_t { kOut, kFunctional };

  // Throws InternalError when there is no such operator, when it changes what
  // it reads, or when its arguments are others.
  AtenCall(const OpCall& op, Form form);

  [[nodiscard]] const c10::OperatorHandle& handle() const { return handle_; }
  [[nodiscard]] const std::optional<at::Generator>& generator() const {
    return generator_;
  }
  // The places of tensors that the op writes, in the order of its outputs.
  [[nodiscard]] const std::vector<size_t>& out_positions() const {
    return out_positions_;
  }
  // Writes all arguments but those; tensor_of(i) gives the op's input i.
  template <typename TensorOf>
  void fill(std::vector<c10::IValue>& stack, const TensorOf& tensor_of) const;

 private:
  // A place in the stack that an input of the op goes into.
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

// The results of a call, lists laid out flat.
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

// The types of the operator's results, from a run on tensors without data.
// Unknown where PyTorch cannot run it so; then the results are looked at when
// they are there.
[[nodiscard]] std::vector<TensorType> infer_aten_types(const OpCall& op);

}  // namespace popsim::ops
