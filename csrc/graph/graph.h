// The program as data: named tensors, ops and their attributes.
//
// The bindings build a Graph from the Python IR, and verify() checks it; after
// that it never changes.
#pragma once

#include <complex>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace popsim::graph {

using TensorId = int32_t;
inline constexpr TensorId kNoTensor = -1;

// The kind of a tensor's memory.
enum class TensorKind : int8_t {
  kInput,     // bound to the caller's memory, one slice per micro-batch
  kConstant,  // written once, before the first run
  kVariable,  // kept between runs: weights, buffers, optimizer state, scalars
  kValue,     // written by an op, lives in the arena
  kView,      // the memory of another tensor, with its own shape and strides
};

struct Tensor {
  std::string name;
  TensorKind kind = TensorKind::kValue;
  DType dtype = DType::kFloat32;
  Shape shape;
  Strides strides;
  TensorId base = kNoTensor;  // kView: the tensor that owns the memory
  int64_t offset = 0;  // kView: number of elements from the start of the base

  [[nodiscard]] int64_t numel() const { return num_elements(shape); }
  [[nodiscard]] int64_t bytes() const { return numel() * size_in_bytes(dtype); }
  [[nodiscard]] bool contiguous() const {
    return is_contiguous(shape, strides);
  }
};

// When an op runs.
enum class Phase : int8_t {
  kSetup,     // once, before the first run: only ops that depend on constants
  kForward,   // every micro-batch
  kBackward,  // every micro-batch, after its forward
  kUpdate,    // once per device iteration
};

// One argument of an ATen operator.
struct TensorArgument {
  int64_t input;  // index into Op::inputs
};
struct TensorListArgument {
  std::vector<int64_t> inputs;  // indices into Op::inputs, -1 for None
};
using Argument =
    std::variant<std::monostate, TensorArgument, TensorListArgument, bool,
                 int64_t, double, std::complex<double>, std::string,
                 std::vector<bool>, std::vector<int64_t>, std::vector<double>>;

// All arguments of an ATen operator, in the order of its schema.
struct Arguments {
  std::vector<Argument> values;
};

using Attribute =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>,
                 std::vector<double>, std::vector<std::string>, Arguments>;

class Graph;

struct Op {
  std::string kind;  // name in the op registry
  std::string name;  // name of its first output, for messages and printing
  // kNoTensor: an optional input that is left out.
  std::vector<TensorId> inputs;
  std::vector<TensorId> outputs;  // kNoTensor: a result that no op reads
  std::map<std::string, Attribute, std::less<>> attributes;
  Phase phase = Phase::kForward;
  int32_t stage = 0;
  std::string source;  // "file:line" of the user's code; may be empty
  // Programs that the op runs: the body that a loop repeats, the bodies that a
  // branch chooses from. Each has its own tensors. The inputs of a body, in the
  // order of their ids, are the op's inputs or slices of them; its last op,
  // `yield`, names its results.
  std::vector<std::shared_ptr<const Graph>> bodies;
};

// The name of an op in messages: 'fc1/Gemm:0' (matmul, net.py:12).
[[nodiscard]] std::string describe(const Op& op);
std::ostream& operator<<(std::ostream& out, const Op& op);

class Graph {
 public:
  TensorId add(Tensor tensor);
  void add(Op op);

  [[nodiscard]] const Tensor& tensor(TensorId id) const;
  [[nodiscard]] bool has(TensorId id) const {
    return id >= 0 && static_cast<size_t>(id) < tensors_.size();
  }
  [[nodiscard]] const std::vector<Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] const std::vector<Op>& ops() const { return ops_; }
  // The tensor that owns the memory of `id`: the tensor itself, or the base of
  // a view.
  [[nodiscard]] TensorId root(TensorId id) const;
  [[nodiscard]] int32_t num_stages() const;

 private:
  std::vector<Tensor> tensors_;
  std::vector<Op> ops_;
};

inline constexpr std::string_view kYield = "yield";
// The inputs of a body, in order.
[[nodiscard]] std::vector<TensorId> inputs_of(const Graph& body);
// The results of a body: the inputs of its last op.
[[nodiscard]] const std::vector<TensorId>& results_of(const Graph& body);

// Throws InternalError with the first op or tensor that breaks a rule: sizes
// and strides must be valid, views must lie inside their base, ids must exist,
// and phases must be in order; also in the bodies of ops. ops/check.h checks
// what depends on the meaning of ops.
void verify(const Graph& graph);

// One line per op, in execution order.
[[nodiscard]] std::string to_string(const Graph& graph);
[[nodiscard]] std::string_view name_of(Phase phase);

}  // namespace popsim::graph
