#include "ops/custom/call.h"

#include <algorithm>
#include <array>
#include <utility>

#include "threads/tasks.h"

namespace popsim::ops::custom {
namespace {

using graph::TensorId;

// Indices are the dtype numbers of popsim_custom_op.h.
constexpr std::array kTypes{DType::kBool,   DType::kUInt8, DType::kInt8,
                            DType::kInt16,  DType::kInt32, DType::kFloat16,
                            DType::kFloat32};

int32_t number_of(DType dtype) {
  const auto* found = std::ranges::find(kTypes, dtype);
  check_internal(found != kTypes.end(), name_of(dtype),
                 " is not a dtype that operands of a custom operator can have");
  return static_cast<int32_t>(found - kTypes.begin());
}

constexpr int32_t kMostAxes = 64;

}  // namespace

Call::Call(const OpCall& op, size_t num_inputs,
           const std::vector<TensorId>& outputs)
    : popsim_call{},
      operator_(join(op.attribute<std::string>("domain"),
                     "::", op.attribute<std::string>("name"), " version ",
                     op.attribute<int64_t>("version"))) {
  for (size_t i = 0; i < num_inputs; ++i) add_operand(op.input(i));
  for (const TensorId id : outputs) add_operand(op.graph().tensor(id));
  for (size_t i = 0; i < operands_.size(); ++i) {
    operands_[i].shape = shapes_[i].data();
  }
  read_attributes(op);
  popsim_call& shown = *this;
  shown.inputs = operands_.data();
  shown.outputs = operands_.data() + num_inputs;
  shown.attributes = attributes_.data();
  shown.num_inputs = static_cast<int64_t>(num_inputs);
  shown.num_outputs = std::ssize(outputs);
  shown.num_attributes = std::ssize(attributes_);
  shown.declare = &Call::declare_output;
  shown.fail = &Call::keep_message;
  shown.share = &Call::share_work;
}

void Call::add_operand(const graph::Tensor& tensor) {
  shapes_.push_back(tensor.shape);
  operands_.push_back({nullptr, nullptr,
                       static_cast<int32_t>(tensor.shape.size()),
                       number_of(tensor.dtype)});
}

// A layout is `<type> <count> <name>`: `float 3 alphas` takes the next three
// floats, `float 1 alpha` is a list of one float, and `float - alpha` is a
// single float.
Call::Attribute Call::read_layout(const OpCall& op,
                                  const std::string& text) const {
  static constexpr std::array<std::string_view, 3> kNames{"int", "float",
                                                          "str"};
  const size_t first = text.find(' ');
  const size_t second = text.find(' ', first + 1);
  op.require(first != std::string::npos && second != std::string::npos,
             "layout '", text, "' has a type, a count and a name");
  const auto* type = std::ranges::find(kNames, text.substr(0, first));
  op.require(type != kNames.end(), "layout '", text,
             "' has the type int, float or str");
  const std::string count = text.substr(first + 1, second - first - 1);
  const bool is_number =
      !count.empty() && count.size() < 10 &&
      std::ranges::all_of(count, [](char c) { return c >= '0' && c <= '9'; });
  op.require(count == "-" || is_number, "layout '", text, "' has a count");
  return {text.substr(second + 1), static_cast<int32_t>(type - kNames.begin()),
          count != "-", 0, is_number ? std::stoul(count) : 1};
}

void Call::read_attributes(const OpCall& op) {
  ints_ = op.attribute<std::vector<int64_t>>("ints");
  floats_ = op.attribute<std::vector<double>>("floats");
  strings_ = op.attribute<std::vector<std::string>>("strings");
  for (const std::string& text : strings_) texts_.push_back(text.c_str());
  const std::array sizes{ints_.size(), floats_.size(), strings_.size()};
  std::array<size_t, 3> used{};
  for (const auto& text :
       op.attribute<std::vector<std::string>>("attributes")) {
    Attribute one = read_layout(op, text);
    const auto type = static_cast<size_t>(one.type);
    op.require(one.count <= sizes[type] - used[type], "attribute '", one.name,
               "' has all its values");
    one.begin = used[type];
    used[type] += one.count;
    layouts_.push_back(std::move(one));
  }
  op.require(used == sizes, "each value belongs to an attribute");
  for (const Attribute& one : layouts_) {
    const void* values =
        one.type == POPSIM_INTS
            ? static_cast<const void*>(ints_.data() + one.begin)
        : one.type == POPSIM_FLOATS
            ? static_cast<const void*>(floats_.data() + one.begin)
            : static_cast<const void*>(texts_.data() + one.begin);
    attributes_.push_back({one.name.c_str(), values,
                           static_cast<int64_t>(one.count), one.type,
                           one.is_list ? 1 : 0});
  }
}

void Call::declare_output(popsim_call* call, int32_t dtype, int32_t rank,
                          const int64_t* shape) {
  auto& self = static_cast<Call&>(*call);
  if (!self.message_.empty()) return;
  const bool has_type = dtype >= 0 && dtype < std::ssize(kTypes);
  const bool has_axes =
      rank >= 0 && rank <= kMostAxes && (rank == 0 || shape != nullptr);
  if (!has_type || !has_axes) {
    self.message_ =
        "its shape rule declares a dtype or a rank that does not exist";
    return;
  }
  TensorType type{kTypes[static_cast<size_t>(dtype)],
                  rank == 0 ? Shape{} : Shape(shape, shape + rank)};
  if (!is_valid_shape(type.shape)) {
    self.message_ =
        join("its shape rule declares the shape ", to_string(type.shape));
    return;
  }
  self.declared_.push_back(std::move(type));
}

void Call::keep_message(popsim_call* call, const char* message) {
  auto& self = static_cast<Call&>(*call);
  if (self.message_.empty() && message != nullptr) self.message_ = message;
}

void Call::share_work(popsim_call* /*call*/, int64_t units,
                      int64_t numbers_per_unit,
                      void (*body)(void* data, int64_t begin, int64_t end),
                      void* data) {
  if (units <= 0) return;
  constexpr double kMost = 1e15;
  const double numbers =
      static_cast<double>(units) *
      static_cast<double>(std::max<int64_t>(numbers_per_unit, 1));
  const auto work =
      threads::elements(static_cast<int64_t>(std::min(numbers, kMost)));
  threads::Tasks(work, units).run([&](int64_t /*task*/, threads::Range part) {
    body(data, part.begin, part.end);
  });
}

void Call::check(int returned, const char* function) {
  if (returned == 0 && message_.empty()) return;
  // Clears the message for the next run.
  const std::string said = std::exchange(message_, "");
  throw UserError(join("the ", function, " of ", operator_, " failed: ",
                       said.empty() ? "it gives no reason" : said));
}

const popsim_custom_op& operator_of(const OpCall& op) {
  const auto& domain = op.attribute<std::string>("domain");
  const auto& name = op.attribute<std::string>("name");
  const auto version = op.attribute<int64_t>("version");
  const popsim_custom_op* found = custom::find(domain, name, version);
  op.require(found != nullptr, "operator ", domain, "::", name, " version ",
             version, " exists");
  return *found;
}

namespace {

std::vector<TensorType> results_of(const OpCall& op,
                                   const popsim_custom_op& entry,
                                   size_t num_inputs) {
  if (entry.shapes == nullptr) return {TensorType::unknown()};
  Call call(op, num_inputs, {});
  call.check(entry.shapes(&call), "shape rule");
  check_user(!call.declared().empty(), "the shape rule of ", op.op().name,
             " declares no output");
  return call.declared();
}

void require_type(const OpCall& op, size_t input, const TensorType& type) {
  op.require(input < op.num_inputs(), "input ", input, " is present");
  op.require(op.input(input).dtype == type.dtype &&
                 op.input(input).shape == type.shape,
             "input ", input, " is ", name_of(type.dtype),
             to_string(type.shape));
}

// The types of the results of the gradient, whose own inputs come after the
// operator's.
std::vector<TensorType> gradients_of(const OpCall& op,
                                     const popsim_custom_op& entry,
                                     size_t num_inputs) {
  op.require(entry.gradient != nullptr, "the operator has a gradient");
  op.require(num_inputs <= op.num_inputs(), "the op has the ", num_inputs,
             " inputs of the operator");
  const std::vector<TensorType> results = results_of(op, entry, num_inputs);
  if (results.back().state == TensorType::State::kKnown) {
    size_t next = num_inputs;
    for (const TensorType& type : results) require_type(op, next++, type);
    for (const TensorType& type : results) {
      if (is_floating(type.dtype)) require_type(op, next++, type);
    }
    op.require(next == op.num_inputs(), "the op has ", next, " inputs");
  }
  std::vector<TensorType> types;
  for (size_t i = 0; i < num_inputs; ++i) {
    if (is_floating(op.input(i).dtype)) types.push_back(op.input_type(i));
  }
  op.require(!types.empty(), "at least one input has a floating-point dtype");
  return types;
}

}  // namespace

std::vector<TensorType> types_of(const OpCall& op) {
  for (size_t i = 0; i < op.num_inputs(); ++i) op.require_contiguous(i);
  const popsim_custom_op& entry = operator_of(op);
  if (!op.has_attribute("gradient_of")) {
    return results_of(op, entry, op.num_inputs());
  }
  return gradients_of(
      op, entry, static_cast<size_t>(op.attribute<int64_t>("gradient_of")));
}

}  // namespace popsim::ops::custom
