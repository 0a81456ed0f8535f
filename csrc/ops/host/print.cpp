// Writes a tensor to stderr each time it runs, in the order of the schedule;
// its output is the input, unchanged.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <complex>

#include "ops/host/print_format.h"
#include "ops/op_def.h"
#include "ops/operands/strided_walk.h"
#include "ops/work.h"
#include "threads/output.h"

namespace popsim::ops {
namespace {

// Copies elements of type From, in row-major order.
template <typename From, typename To>
void read_values(const void* source, const StridedWalk& walk,
                 std::vector<To>& values) {
  const auto* first = static_cast<const From*>(source);
  To* out = values.data();
  walk.for_each_run(0, static_cast<int64_t>(values.size()),
                    [&](int64_t offset, int64_t stride, int64_t count) {
                      for (int64_t i = 0; i < count; ++i) {
                        *out++ = static_cast<To>(first[offset + i * stride]);
                      }
                    });
}

template <typename To>
using ReadValues = void (*)(const void* source, const StridedWalk& walk,
                            std::vector<To>& values);

template <typename Value>
class PrintKernel final : public Kernel {
 public:
  PrintKernel(const OpView& op, ReadValues<Value> read, PrintOptions options)
      : input_(op.input_id(0)),
        shape_(op.input(0).shape),
        walk_(shape_, op.input(0).strides),
        read_(read),
        options_(std::move(options)),
        values_(static_cast<size_t>(num_elements(shape_))) {}

  void run(const RunContext& context) override {
    read_(context.data(input_), walk_, values_);
    std::string text;
    if (context.loop.replicas == 1) {
      text = format_tensor(values_, shape_, options_);
    } else {
      PrintOptions own = options_;
      own.title += join("_replica_", context.cursor.replica);
      text = format_tensor(values_, shape_, own) + "\n";
    }
    threads::write(text);
  }

 private:
  graph::TensorId input_;
  Shape shape_;
  StridedWalk walk_;
  ReadValues<Value> read_;
  PrintOptions options_;
  std::vector<Value> values_;
};

// Only the first character of a separator or bracket is used.
std::string first_character(const OpView& op, std::string_view attribute) {
  return op.attribute<std::string>(attribute).substr(0, 1);
}

PrintOptions parse_options(const OpView& op) {
  return {
      .title = op.attribute<std::string>("title"),
      .summarise_threshold = op.attribute<int64_t>("summarise_threshold"),
      .edge_items = op.attribute<int64_t>("edge_items"),
      .max_line_width = op.attribute<int64_t>("max_line_width"),
      .digits = op.attribute<int64_t>("digits"),
      .float_format =
          float_format_from_name(op.attribute<std::string>("float_format")),
      .separator = first_character(op, "separator"),
      .open_bracket = first_character(op, "open_bracket"),
      .close_bracket = first_character(op, "close_bracket"),
      .is_float64 = op.input(0).dtype == DType::kFloat64,
  };
}

std::unique_ptr<Kernel> prepare_print(const OpView& op) {
  const auto integers = [&](ReadValues<int64_t> read) {
    return std::make_unique<PrintKernel<int64_t>>(op, read, parse_options(op));
  };
  const auto floats = [&](ReadValues<double> read) {
    return std::make_unique<PrintKernel<double>>(op, read, parse_options(op));
  };
  using Complex = std::complex<double>;
  switch (op.input(0).dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return integers(read_values<uint8_t, int64_t>);
    case DType::kInt8:
      return integers(read_values<int8_t, int64_t>);
    case DType::kInt16:
      return integers(read_values<int16_t, int64_t>);
    case DType::kInt32:
      return integers(read_values<int32_t, int64_t>);
    case DType::kInt64:
      return integers(read_values<int64_t, int64_t>);
    case DType::kFloat16:
      return floats(read_values<at::Half, double>);
    case DType::kBFloat16:
      return floats(read_values<at::BFloat16, double>);
    case DType::kFloat32:
      return floats(read_values<float, double>);
    case DType::kFloat64:
      return floats(read_values<double, double>);
    case DType::kComplex64:
      return std::make_unique<PrintKernel<Complex>>(
          op, read_values<std::complex<float>, Complex>, parse_options(op));
  }
  throw InternalError("print: unknown dtype");
}

std::vector<TensorType> printed_type(const OpCall& op) {
  return {op.input_type(0)};
}

std::vector<graph::Work> print_work(const OpView& op) {
  return {graph::Host{op.input(0).bytes()}};
}

}  // namespace

extern const OpDef kPrint{
    .name = "print",
    .schema =
        "print(Tensor(a) x, *, str title, int summarise_threshold, "
        "int edge_items, int max_line_width, int digits, "
        "str{auto, fixed, scientific, none} float_format, str separator, "
        "str open_bracket, str close_bracket) -> Tensor(a)",
    .family = "host",
    .shape = printed_type,
    .prepare = prepare_print,
    .work = print_work,
    .outputs = OutputLayout::kAny,
    .exact = true,
};

}  // namespace popsim::ops
