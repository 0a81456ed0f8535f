#include "ops/host/print_format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/check.h"

namespace popsim::ops {
namespace {

constexpr int64_t kGap = -1;  // marks positions that are left out
constexpr std::string_view kGapText = "...";

// Positions shown along one axis.
std::vector<int64_t> shown_positions(int64_t size, bool summarise,
                                     int64_t edge_items) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < size; ++i) {
    const bool edge = i < edge_items || i >= size - edge_items;
    if (!summarise || edge) {
      positions.push_back(i);
    } else if (positions.empty() || positions.back() != kGap) {
      positions.push_back(kGap);
    }
  }
  return positions;
}

std::vector<std::vector<int64_t>> shown_positions(const Shape& shape,
                                                  const PrintOptions& options) {
  const int64_t edge_items = std::max<int64_t>(options.edge_items, 0);
  const int64_t threshold = options.summarise_threshold;
  const bool summarise = threshold > 0 && num_elements(shape) > threshold;
  std::vector<std::vector<int64_t>> positions;
  for (const int64_t size : shape) {
    positions.push_back(
        shown_positions(size, summarise && size > 2 * edge_items, edge_items));
  }
  return positions;
}

// Indices of the shown elements, in row-major order.
void collect_indices(const Shape& shape,
                     const std::vector<std::vector<int64_t>>& positions,
                     size_t axis, int64_t first, std::vector<int64_t>& out) {
  if (axis == shape.size()) {
    out.push_back(first);
    return;
  }
  for (const int64_t position : positions[axis]) {
    if (position == kGap) continue;
    collect_indices(shape, positions, axis + 1, first * shape[axis] + position,
                    out);
  }
}

// The common format of all numbers of one tensor.
class NumberFormat {
 public:
  NumberFormat(std::span<const double> shown, const PrintOptions& options);
  [[nodiscard]] std::string text(double value) const;
  [[nodiscard]] bool aligned() const { return format_ != FloatFormat::kNone; }

 private:
  [[nodiscard]] std::string natural_text(double value) const;
  void choose_auto();

  FloatFormat format_;
  bool is_float64_;
  int decimals_ = 1;
  double largest_ = 0.0;  // finite magnitudes
  double smallest_ = std::numeric_limits<double>::infinity();  // not 0
};

int integer_digits(double magnitude) {
  return magnitude < 10.0
             ? 1
             : static_cast<int>(std::floor(std::log10(magnitude))) + 1;
}

NumberFormat::NumberFormat(std::span<const double> shown,
                           const PrintOptions& options)
    : format_(options.float_format), is_float64_(options.is_float64) {
  constexpr int64_t kMaxDigits = 100;
  for (const double value : shown) {
    if (!std::isfinite(value)) continue;
    largest_ = std::max(largest_, std::abs(value));
    if (value != 0.0) smallest_ = std::min(smallest_, std::abs(value));
  }
  const auto digits = static_cast<int>(std::min(options.digits, kMaxDigits));
  if (digits <= 0) format_ = FloatFormat::kNone;
  if (format_ == FloatFormat::kAuto) choose_auto();
  decimals_ = format_ == FloatFormat::kScientific
                  ? digits - 1
                  : std::max(digits - integer_digits(largest_), 1);
}

void NumberFormat::choose_auto() {
  constexpr double kLarge = 1e8;
  constexpr double kSmall = 1e-4;
  constexpr double kMaxRatio = 1000.0;
  const double small =
      is_float64_ ? kSmall : static_cast<double>(static_cast<float>(kSmall));
  const bool wide = largest_ >= kLarge || smallest_ < small ||
                    largest_ / smallest_ > kMaxRatio;
  format_ = wide ? FloatFormat::kScientific : FloatFormat::kFixed;
}

template <typename... Format>
std::string to_text(Format... format) {
  std::array<char, 512> buffer;
  const auto [end, error] =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), format...);
  check_internal(error == std::errc{}, "print: a number does not fit");
  return {buffer.data(), end};
}

std::string NumberFormat::text(double value) const {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  switch (format_) {
    case FloatFormat::kScientific:
      return to_text(value, std::chars_format::scientific, decimals_);
    case FloatFormat::kFixed:
      return to_text(value, std::chars_format::fixed, decimals_);
    case FloatFormat::kAuto:
    case FloatFormat::kNone:
      break;
  }
  return natural_text(value);
}

// The shortest text that reads back as the same number.
std::string NumberFormat::natural_text(double value) const {
  const double magnitude = std::abs(value);
  const bool plain = magnitude == 0.0 || (magnitude >= 1e-4 && magnitude < 1e8);
  const auto format =
      plain ? std::chars_format::fixed : std::chars_format::scientific;
  return is_float64_ ? to_text(value, format)
                     : to_text(static_cast<float>(value), format);
}

class Writer {
 public:
  Writer(const std::vector<std::vector<int64_t>>& positions,
         std::span<const std::string> numbers, const PrintOptions& options)
      : positions_(positions), numbers_(numbers), options_(options) {
    if (!options.title.empty()) text_ = options.title + ": ";
  }
  [[nodiscard]] std::string write() {
    write_tensor(0);
    return text_ + '\n';
  }

 private:
  void write_tensor(size_t depth);
  void write_row(size_t depth);
  void new_line(size_t indent) {
    text_ += '\n';
    line_start_ = text_.size();
    text_.append(indent, ' ');
  }
  const std::string& next_number() { return numbers_[next_++]; }

  const std::vector<std::vector<int64_t>>& positions_;  // by axis
  std::span<const std::string> numbers_;
  const PrintOptions& options_;
  std::string text_;
  size_t line_start_ = 0;
  size_t next_ = 0;
};

void Writer::write_tensor(size_t depth) {
  if (positions_.empty()) {
    text_ += next_number();
    return;
  }
  if (depth + 1 == positions_.size()) {
    write_row(depth);
    return;
  }
  text_ += options_.open_bracket;
  for (const int64_t position : positions_[depth]) {
    new_line(depth + 1);
    if (position == kGap) {
      text_ += kGapText;
    } else {
      write_tensor(depth + 1);
    }
  }
  new_line(depth);
  text_ += options_.close_bracket;
}

void Writer::write_row(size_t depth) {
  const auto max_width =
      static_cast<size_t>(std::max<int64_t>(options_.max_line_width, 0));
  const std::vector<int64_t>& row = positions_[depth];
  text_ += options_.open_bracket;
  for (size_t i = 0; i < row.size(); ++i) {
    const bool last = i + 1 == row.size();
    const std::string item =
        (row[i] == kGap ? std::string(kGapText) : next_number()) +
        (last ? options_.close_bracket : options_.separator);
    const size_t width = text_.size() - line_start_ + item.size();
    if (i > 0 && max_width > 0 && width > max_width) new_line(depth + 2);
    text_ += item;
  }
  if (row.empty()) text_ += options_.close_bracket;
}

void align_right(std::vector<std::string>& numbers) {
  size_t width = 0;
  for (const std::string& number : numbers) {
    width = std::max(width, number.size());
  }
  for (std::string& number : numbers) {
    number.insert(0, width - number.size(), ' ');
  }
}

template <typename T>
std::vector<T> shown_values(
    std::span<const T> values, const Shape& shape,
    const std::vector<std::vector<int64_t>>& positions) {
  check_internal(static_cast<int64_t>(values.size()) == num_elements(shape),
                 "print: ", values.size(), " values for shape ",
                 to_string(shape));
  std::vector<int64_t> indices;
  if (!values.empty()) collect_indices(shape, positions, 0, 0, indices);
  std::vector<T> shown;
  for (const int64_t index : indices) {
    shown.push_back(values[static_cast<size_t>(index)]);
  }
  return shown;
}

}  // namespace

FloatFormat float_format_from_name(std::string_view name) {
  if (name == "auto") return FloatFormat::kAuto;
  if (name == "fixed") return FloatFormat::kFixed;
  if (name == "scientific") return FloatFormat::kScientific;
  if (name == "none") return FloatFormat::kNone;
  throw InternalError(join("print: no float format '", name, "'"));
}

std::string format_tensor(std::span<const double> values, const Shape& shape,
                          const PrintOptions& options) {
  const auto positions = shown_positions(shape, options);
  const std::vector<double> shown = shown_values(values, shape, positions);
  const NumberFormat format(shown, options);
  std::vector<std::string> numbers;
  for (const double value : shown) numbers.push_back(format.text(value));
  if (format.aligned()) align_right(numbers);
  return Writer(positions, numbers, options).write();
}

std::string format_tensor(std::span<const int64_t> values, const Shape& shape,
                          const PrintOptions& options) {
  const auto positions = shown_positions(shape, options);
  std::vector<std::string> numbers;
  for (const int64_t value : shown_values(values, shape, positions)) {
    numbers.push_back(std::to_string(value));
  }
  align_right(numbers);
  return Writer(positions, numbers, options).write();
}

std::string format_tensor(std::span<const std::complex<double>> values,
                          const Shape& shape, const PrintOptions& options) {
  const auto positions = shown_positions(shape, options);
  std::vector<double> real;
  std::vector<double> imaginary;
  for (const auto& value : shown_values(values, shape, positions)) {
    real.push_back(value.real());
    imaginary.push_back(value.imag());
  }
  const NumberFormat real_format(real, options);
  const NumberFormat imaginary_format(imaginary, options);
  std::vector<std::string> numbers;
  for (size_t i = 0; i < real.size(); ++i) {
    std::string imaginary_part = imaginary_format.text(imaginary[i]);
    if (imaginary_part[0] != '-') imaginary_part.insert(0, 1, '+');
    numbers.push_back(real_format.text(real[i]) + imaginary_part + 'j');
  }
  if (real_format.aligned()) align_right(numbers);
  return Writer(positions, numbers, options).write();
}

}  // namespace popsim::ops
