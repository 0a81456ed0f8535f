// Runs a body a fixed number of times, or as long as a value is true.
//
// The inputs are, in this order: the first carried values; tensors of which
// each iteration reads one slice; tensors that each iteration reads whole. The
// results of the body are the carried values for the next iteration, and slices
// of the other outputs, which stack the slices of all iterations. Outputs: the
// carried values after the last iteration, then the stacks.
#include <cstring>

#include "base/numbers.h"
#include "ops/body.h"
#include "ops/control/types.h"
#include "ops/math/seed.h"

namespace popsim::ops {
namespace {

using graph::TensorId;

// A slice or carried value, which is copied whole.
struct Piece {
  TensorId tensor;
  int64_t bytes;
};

// A carried value has two places, and iterations write to them alternately: an
// iteration reads one place while it writes the other.
struct Carried {
  TensorId input;
  TensorId output;
  size_t bytes;
  char* other;  // the place that is not the output
  void* now;
};

class Loop final : public Kernel {
 public:
  explicit Loop(const OpView& op)
      : body_(op.body(0)),
        count_(op.attribute<int64_t>("count")),
        reverse_(op.attribute<bool>("reverse")),
        conditional_(op.attribute<bool>("conditional")) {
    const auto carried = static_cast<size_t>(op.attribute<int64_t>("carried"));
    const auto sliced = static_cast<size_t>(op.attribute<int64_t>("sliced"));
    int64_t bytes = 0;
    for (size_t i = 0; i < carried; ++i) {
      bytes += round_up(op.input(i).bytes(), kAlignment);
    }
    others_.resize(static_cast<size_t>(bytes + kAlignment));
    const auto start = reinterpret_cast<uintptr_t>(others_.data());
    auto* next = reinterpret_cast<char*>(
        round_up(static_cast<int64_t>(start), kAlignment));
    for (size_t i = 0; i < carried; ++i) {
      const int64_t size = op.input(i).bytes();
      carried_.push_back({op.input_id(i), op.output_id(i),
                          static_cast<size_t>(size), next, nullptr});
      next += round_up(size, kAlignment);
    }
    for (size_t i = carried; i < op.num_inputs(); ++i) {
      const int64_t size = op.input(i).bytes();
      if (i < carried + sliced) {
        sliced_.push_back({op.input_id(i), count_ == 0 ? 0 : size / count_});
      } else {
        whole_.push_back(op.input_id(i));
      }
    }
    for (size_t i = carried; i < op.num_outputs(); ++i) {
      const int64_t size = op.output(i).bytes();
      stacked_.push_back({op.output_id(i), count_ == 0 ? 0 : size / count_});
    }
  }

  void run(const RunContext& context) override {
    for (Carried& value : carried_) value.now = context.data(value.input);
    for (size_t i = 0; i < whole_.size(); ++i) {
      body_.bind_input(carried_.size() + sliced_.size() + i,
                       context.data(whole_[i]));
    }
    for (int64_t iteration = 0; iteration < count_ && goes_on(); ++iteration) {
      // The order of the two places is such that the last iteration writes the
      // outputs.
      run_iteration(context, iteration, (count_ - 1 - iteration) % 2 == 0);
    }
    for (const Carried& value : carried_) {
      void* output = context.data(value.output);
      if (value.now != output) std::memcpy(output, value.now, value.bytes);
    }
  }

 private:
  static constexpr int64_t kAlignment = 64;

  [[nodiscard]] bool goes_on() const {
    return !conditional_ || *static_cast<const bool*>(carried_.front().now);
  }

  void run_iteration(const RunContext& context, int64_t iteration,
                     bool into_output) {
    const int64_t position = reverse_ ? count_ - 1 - iteration : iteration;
    for (size_t i = 0; i < carried_.size(); ++i) {
      Carried& value = carried_[i];
      void* next = into_output ? context.data(value.output) : value.other;
      body_.bind_input(i, value.now);
      body_.bind_result(i, next);
      value.now = next;
    }
    for (size_t i = 0; i < sliced_.size(); ++i) {
      body_.bind_input(carried_.size() + i,
                       slice(context, sliced_[i], position));
    }
    for (size_t i = 0; i < stacked_.size(); ++i) {
      body_.bind_result(carried_.size() + i,
                        slice(context, stacked_[i], position));
    }
    body_.run(context, static_cast<int64_t>(mix_seed(
                           kIteration, static_cast<uint64_t>(position),
                           static_cast<uint64_t>(context.cursor.step))));
  }

  // Makes the random numbers of iterations different from those of
  // micro-batches.
  static constexpr uint64_t kIteration = 0x7472'6970;

  static char* slice(const RunContext& context, const Piece& piece,
                     int64_t position) {
    return context.data<char>(piece.tensor) + position * piece.bytes;
  }

  BodyRunner& body_;
  int64_t count_;
  bool reverse_;
  bool conditional_;
  std::vector<char> others_;
  std::vector<Carried> carried_;
  std::vector<Piece> sliced_;
  std::vector<TensorId> whole_;
  std::vector<Piece> stacked_;
};

TensorType slice_of(const TensorType& whole) {
  return {whole.dtype, Shape(whole.shape.begin() + 1, whole.shape.end())};
}

void check_condition(const OpCall& op, size_t sliced, size_t stacked) {
  if (!op.attribute<bool>("conditional")) return;
  op.require(sliced == 0 && stacked == 0 && !op.attribute<bool>("reverse"),
             "a conditional loop has no slices and no reverse");
  const TensorType condition = op.input_type(0);
  op.require(
      condition.dtype == DType::kBool && num_elements(condition.shape) == 1,
      "the first carried value is one boolean: whether the loop continues");
}

std::vector<TensorType> loop_types(const OpCall& op) {
  const BodyTypes body = body_types(op, 1).front();
  const auto count = op.attribute<int64_t>("count");
  const auto carried = static_cast<size_t>(op.attribute<int64_t>("carried"));
  const auto sliced = static_cast<size_t>(op.attribute<int64_t>("sliced"));
  op.require(body.inputs.size() == op.num_inputs() &&
                 carried + sliced <= op.num_inputs() &&
                 carried <= body.results.size(),
             "the body takes all inputs and returns all carried values");
  op.require(op.op().outputs.size() == body.results.size(),
             "the op has an output for each result");
  const bool conditional = op.attribute<bool>("conditional");
  op.require(!conditional || carried > 0,
             "a conditional loop carries its condition");
  check_condition(op, sliced, body.results.size() - carried);
  std::vector<TensorType> types;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    TensorType given = op.input_type(i);
    if (i >= carried && i < carried + sliced) {
      op.require(!given.shape.empty() && given.shape[0] == count, "input ", i,
                 " has a slice for each of ", count, " iterations");
      given = slice_of(given);
    }
    op.require(is_same(given, body.inputs[i]), "input ", i,
               " has the type that the body takes");
    if (i >= carried) continue;
    op.require(is_same(given, body.results[i]), "result ", i,
               " of the body has the type that the next iteration takes");
    types.push_back(given);
  }
  for (size_t i = carried; i < body.results.size(); ++i) {
    TensorType stack = body.results[i];
    stack.shape.insert(stack.shape.begin(), count);
    op.require(is_valid_shape(stack.shape), "the stacked result ", i,
               " has a valid shape");
    types.push_back(stack);
  }
  return types;
}

// Counts the work as if all iterations ran.
std::vector<graph::Work> loop_work(const OpView& op) {
  const bool conditional = op.attribute<bool>("conditional");
  return work_of_body(*op.op().bodies.front(),
                      conditional ? 1 : op.attribute<int64_t>("count"));
}

}  // namespace

extern const OpDef kLoop{
    .name = "loop",
    .schema =
        "loop(Tensor[] values, *, int{0..} count, int{0..} carried, "
        "int{0..} sliced=0, bool reverse=False, bool conditional=False) "
        "-> Tensor[]",
    .family = "control",
    .shape = loop_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Loop>(op);
    },
    .work = loop_work,
};

}  // namespace popsim::ops
