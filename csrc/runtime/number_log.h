// A listener that notes which ops of a run compute NaN and infinities, and
// copies what one of them reads and writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "runtime/listener.h"

namespace popsim::runtime {

// The bad numbers of a tensor.
struct BadTensor {
  graph::TensorId tensor = graph::kNoTensor;
  bool nan = false;
  bool infinity = false;
};

// An execution of an op with a bad result.
struct BadExecution {
  // The position of the op in its graph; for an op of a body, that of the op
  // with the body, the number of the body, and so on inwards.
  std::vector<int64_t> path;
  int64_t number = 0;       // of the execution, counted over all ops of the run
  int64_t micro_batch = 0;  // within the device iteration
  int64_t iteration = 0;    // the device iteration of the run
  int64_t replica = 0;
  std::vector<BadTensor> operands;  // only those that have bad numbers
  std::vector<BadTensor> results;   // the same
};

// What a run has noted.
struct NumberRecord {
  std::vector<BadExecution> executions;  // in their order
  // Copies of the operands and results of one execution; undefined where an op
  // leaves one out.
  std::vector<at::Tensor> operands;
  std::vector<at::Tensor> results;
  // The error that ended the run; empty if none did.
  std::string error;
};

class NumberLog final : public Listener {
 public:
  // Copies the tensors of the execution with the number `copied`; -1: of none.
  // The graph must outlive the log.
  NumberLog(const graph::Graph& graph, int64_t copied);

  void before(const graph::Op& op, const ops::RunContext& context) override;
  void after(const graph::Op& op, const ops::RunContext& context) override;
  [[nodiscard]] Listener* of_body(const graph::Graph& body) override {
    return bodies_.at(&body).get();
  }

  [[nodiscard]] NumberRecord& record() { return shared_->record; }

 private:
  // What the logs of a graph and of its bodies have in common.
  struct Shared {
    NumberRecord record;
    int64_t copied = -1;
    int64_t num_begun = 0;
  };

  NumberLog(const graph::Graph& graph, std::shared_ptr<Shared> shared,
            std::vector<int64_t> path);

  [[nodiscard]] at::Tensor value(graph::TensorId id,
                                 const ops::RunContext& context) const;
  [[nodiscard]] std::vector<at::Tensor> copies(
      const std::vector<graph::TensorId>& ids,
      const ops::RunContext& context) const;
  [[nodiscard]] std::vector<BadTensor> bad_among(
      const std::vector<graph::TensorId>& ids,
      const ops::RunContext& context) const;
  // The inputs whose values the op reads.
  [[nodiscard]] std::vector<graph::TensorId> read_by(
      const graph::Op& op, const ops::RunContext& context) const;

  const graph::Graph& graph_;
  std::shared_ptr<Shared> shared_;
  std::vector<int64_t> path_;
  std::unordered_map<const graph::Graph*, std::unique_ptr<NumberLog>> bodies_;
  // The execution at hand, and the bad tensors that it reads.
  int64_t number_ = 0;
  std::vector<BadTensor> operands_;
};

}  // namespace popsim::runtime
