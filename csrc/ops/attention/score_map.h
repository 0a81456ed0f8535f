// Runs the code of a map codelet on some rows of one head's scores, in place.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dense/piece_matmul.h"
#include "ops/map/runner.h"

namespace popsim::ops {

// The map that the attributes of an attention op describe. Value 0 is the
// scores; after it come inputs of the op that broadcast to `shape`. The last
// two axes of `shape` are the rows and columns of the scores, the axes before
// them are the batch.
struct ScoreMapSpec {
  std::vector<std::string> code;
  std::vector<double> constants;
  int64_t result = 0;
  Shape shape;
  size_t first_input = 0;  // of the op
  size_t num_inputs = 0;
};

// Each thread has one of these.
class ScoreMap {
 public:
  // `rows`: how the rows of a head are divided.
  ScoreMap(const OpView& op, const ScoreMapSpec& spec, const dense::Cut& rows);

  void run(const RunContext& context, int64_t head, int64_t piece,
           float* scores);

 private:
  struct Input {
    graph::TensorId id;
    int64_t item_bytes;
    StridedWalk heads;  // offset of each head
    int64_t row_stride;
  };
  // The map for a piece with this number of rows.
  struct Sized {
    MapPlan plan;
    MapRunner runner;
  };
  class PieceContext;

  [[nodiscard]] Sized plan_rows(const OpView& op, const ScoreMapSpec& spec,
                                int64_t num_rows) const;

  dense::Cut rows_;
  std::vector<Input> inputs_;
  std::vector<void*> pointers_;  // of the scores, the inputs and the result
  std::optional<Sized> whole_;   // absent if there is nothing to do
  std::optional<Sized> last_;
};

}  // namespace popsim::ops
