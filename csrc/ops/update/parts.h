// Update ops for several parameters at once.
//
// The attribute "parameters" is the number of parameters of an update op;
// without it, there is one. The inputs and outputs are those of one parameter
// after the other; each of these parts is like an op for a single parameter.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "ops/update/common.h"

namespace popsim::ops::update {

// The parts of an op, each as a separate op.
[[nodiscard]] std::vector<graph::Op> split_into_parts(const OpCall& op);

// The elements of several tensors, divided into blocks.
class Blocks {
 public:
  void add(int64_t numel) { starts_.push_back(starts_.back() + numel); }

  // Calls body(tensor, begin, size) for each block of each tensor. Threads get
  // the same number of elements, so they may divide a tensor; the starts of
  // blocks do not depend on it.
  template <typename Body>
  void for_each(const Body& body) const {
    const threads::Shares shares(work_of(starts_.back()), starts_.back());
    shares.run([&](int64_t /*share*/, threads::Range elements) {
      for_each_in(elements.begin, elements.end, body);
    });
  }

 private:
  // Calls body for the blocks that begin at elements [first, last) of all
  // tensors together.
  template <typename Body>
  void for_each_in(int64_t first, int64_t last, const Body& body) const {
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), first);
    auto tensor = static_cast<size_t>(next - starts_.begin() - 1);
    int64_t begin = num_blocks(first - starts_[tensor]) * kBlock;
    for (; starts_[tensor] < last; ++tensor, begin = 0) {
      const int64_t numel = starts_[tensor + 1] - starts_[tensor];
      const int64_t end = std::min(numel, last - starts_[tensor]);
      for (; begin < end; begin += kBlock) {
        body(tensor, begin, std::min(kBlock, numel - begin));
      }
    }
  }

  std::vector<int64_t> starts_{0};  // of the tensors, placed end to end
};

// A Part for each parameter of an op, made from the OpView of its part.
template <typename Part>
class Parts {
 public:
  explicit Parts(const OpView& op) {
    for (const graph::Op& part : split_into_parts(op)) {
      const OpView view(op.graph(), part);
      parts_.emplace_back(view);
      blocks_.add(view.input(0).numel());
    }
  }

  [[nodiscard]] auto begin() { return parts_.begin(); }
  [[nodiscard]] auto end() { return parts_.end(); }

  // Calls body(part, begin, size) for each block of each weight.
  template <typename Body>
  void for_each_block(const Body& body) {
    blocks_.for_each([&](size_t part, int64_t begin, int64_t size) {
      body(parts_[part], begin, size);
    });
  }

 private:
  std::vector<Part> parts_;
  Blocks blocks_;
};

// The kernel of an update whose Part has two functions: begin_step(context)
// reads the scalars, and update_block(context, begin, size) computes a block.
template <typename Part>
class BlockwiseUpdate final : public Kernel {
 public:
  explicit BlockwiseUpdate(const OpView& op) : parts_(op) {}

  void run(const RunContext& context) override {
    for (Part& part : parts_) part.begin_step(context);
    parts_.for_each_block([&](const Part& part, int64_t begin, int64_t size) {
      part.update_block(context, begin, size);
    });
  }

 private:
  Parts<Part> parts_;
};

template <typename Part>
[[nodiscard]] std::unique_ptr<Kernel> prepare_blockwise(const OpView& op) {
  return std::make_unique<BlockwiseUpdate<Part>>(op);
}

// The type of a term with one element for each element of the weight.
[[nodiscard]] inline TensorType term_type(const OpCall& part) {
  return {DType::kFloat32, part.input(0).shape};
}

// For ops without terms.
[[nodiscard]] inline std::vector<TensorType> no_terms(const OpCall&) {
  return {};
}

// The types of [weight, states..., terms...] for each part; kNumStates(part) is
// the number of states of a part. All states except a step, which is one
// number, have the weight's shape, and the gradient has it too. Terms may be
// left out at the end of all parts.
template <auto kNumStates, auto kTerms = no_terms>
[[nodiscard]] std::vector<TensorType> updated_types(const OpCall& op) {
  std::vector<TensorType> types;
  const std::vector<graph::Op> parts = split_into_parts(op);
  for (const graph::Op& whole : parts) {
    const OpCall part(op.graph(), whole);
    const Shape& shape = part.input(0).shape;
    if (part.has_input(1)) part.require_shape(1, shape);
    types.push_back(part.input_type(0));
    for (size_t i = 2; i < kNumStates(part) + 2; ++i) {
      types.push_back(part.input_type(i));
    }
    std::vector<TensorType> terms = kTerms(part);
    if (parts.size() > 1) {
      const size_t kept = kNumStates(part) + 1;
      const size_t given = std::max(whole.outputs.size(), kept) - kept;
      terms.resize(std::min(given, terms.size()), term_type(part));
    }
    types.insert(types.end(), terms.begin(), terms.end());
  }
  return types;
}

// For entries whose ops compute every element of each weight.
template <int64_t kCost>
[[nodiscard]] std::vector<graph::Work> updating(const OpView& op) {
  graph::Elementwise work{0, kCost};
  for (const graph::Op& part : split_into_parts(op)) {
    work.elements += op.graph().tensor(part.inputs[0]).numel();
  }
  return {work};
}

// For ops with the same number of states in every case.
template <size_t kCount>
[[nodiscard]] size_t num_states(const OpCall&) {
  return kCount;
}

}  // namespace popsim::ops::update
