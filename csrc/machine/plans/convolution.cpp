#include "machine/plans/convolution.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "base/check.h"
#include "machine/constants.h"
#include "machine/formulas/partials.h"
#include "machine/plans/parts.h"

namespace popsim::machine {
namespace {

constexpr int64_t kMaxColumnParts = 4;
constexpr int64_t kMaxTurns = 16;
constexpr int64_t kFewChannels = 4;  // kernel columns are folded into channels

// Cycles of a tile for a kernel of several elements: the nx1 vertex.
double window_cycles(const ProductTypes& types, int32_t version, int64_t rows,
                     int64_t columns, int64_t in, int64_t out, int64_t kernel) {
  constexpr int64_t kWork = constants::kWorkers;
  const int64_t core = types.half ? 4 : 8;
  const auto piece = [&](int64_t n) {
    return 3 + std::max<int64_t>(17, 34 + core * (n - 3)) - 9;
  };
  const int64_t worker =
      18 + (rows >= kWork ? ceil_div(rows, kWork) * piece(columns)
                          : piece(ceil_div(rows * columns, kWork)));
  const int64_t num_in = ceil_div(in, types.channels());
  const int64_t num_out = ceil_div(out, types.units(version));
  const int64_t vector = 8 / types.partial_size();
  const int64_t results = rows * columns * out;
  return static_cast<double>(
      223 + 16 +
      num_in * (14 + num_out * (14 + 14 +
                                kernel * (30 + types.load(version) +
                                          kWork * worker))) +
      kWork * (6 + ceil_div(ceil_div(results, kWork), vector)));
}

class ConvolutionSearch {
 public:
  ConvolutionSearch(const Device& device, int64_t tiles,
                    const ConvolutionProblem& problem)
      : device_(device), tiles_(tiles), problem_(packed(problem)) {
    kernel_ = problem_.kernel_rows * problem_.kernel_columns;
  }

  ConvolutionPlan run(double proportion) {
    const int64_t in_units = ceil_div(problem_.in, problem_.types.channels());
    out_units_ = ceil_div(problem_.out, problem_.types.units(device_.version));
    for (const int64_t groups : useful_parts(problem_.groups, tiles_)) {
      for (const int64_t in : useful_parts(in_units, tiles_ / groups)) {
        for (const int64_t out :
             useful_parts(out_units_, tiles_ / (groups * in))) {
          look({.in = in, .out = out, .groups = groups});
        }
      }
    }
    return plans_.best(proportion * static_cast<double>(device_.tile_bytes));
  }

 private:
  // Narrow groups share passes of the unit, and kernels for few channels have
  // their columns as channels.
  static ConvolutionProblem packed(ConvolutionProblem problem) {
    if (problem.groups > 1) {
      const int64_t width = problem.types.channels();
      const int64_t most = std::max(problem.in, problem.out);
      const int64_t pack = std::clamp<int64_t>(
          width / std::max<int64_t>(most, 1), 1, problem.groups);
      problem.groups = ceil_div(problem.groups, pack);
      problem.in *= pack;
      problem.out *= pack;
    } else if (problem.in <= kFewChannels && problem.kernel_columns > 1) {
      problem.in = kFewChannels * kFewChannels;
      problem.kernel_columns = ceil_div(problem.kernel_columns, kFewChannels);
    }
    return problem;
  }

  void look(ConvolutionPlan plan) {
    const int64_t left = tiles_ / (plan.in * plan.out * plan.groups);
    for (const int64_t batch : useful_parts(problem_.batch, left)) {
      const int64_t most = std::min(kMaxColumnParts, left / batch);
      for (const int64_t columns : useful_parts(problem_.columns, most)) {
        plan.batch = batch;
        plan.columns = columns;
        for (const int64_t rows :
             field_parts(problem_.rows, left / (batch * columns))) {
          plan.rows = rows;
          look_at_turns(plan);
        }
      }
    }
  }

  void look_at_turns(ConvolutionPlan plan) {
    for (plan.turns = 1; plan.turns <= kMaxTurns; plan.turns *= 2) {
      if (plan.turns > 1 && ceil_div(out_units_, plan.out) < plan.turns) break;
      price(plan);
      plans_.keep(plan);
    }
  }

  void price(ConvolutionPlan& plan) const {
    const ProductTypes& types = problem_.types;
    const int64_t unit = types.units(device_.version);
    const int64_t batch = ceil_div(problem_.batch, plan.batch);
    const int64_t rows = ceil_div(problem_.rows, plan.rows);
    const int64_t columns = ceil_div(problem_.columns, plan.columns);
    const int64_t groups = ceil_div(problem_.groups, plan.groups);
    const int64_t in =
        ceil_div(ceil_div(problem_.in, types.channels()), plan.in) *
        types.channels();
    const int64_t out =
        ceil_div(ceil_div(out_units_, plan.out), plan.turns) * unit;
    const int64_t read_rows =
        (rows - 1) * problem_.stride_rows + problem_.kernel_rows;
    const int64_t read_columns =
        (columns - 1) * problem_.stride_columns + problem_.kernel_columns;
    const auto bytes_in = static_cast<double>(batch * read_rows * read_columns *
                                              in * groups * types.size());
    const auto bytes_weights =
        static_cast<double>(kernel_ * in * out * groups * types.size());
    const int64_t results = batch * rows * columns * out * groups;
    const bool shared = device_.shares_bus && plan.out % 2 == 0;
    const int64_t field_parts = plan.batch * plan.rows * plan.columns;
    double exchange =
        (bytes_in - bytes_in / static_cast<double>(plan.out)) /
            (shared ? 2 * constants::kExchangeBytes
                    : constants::kExchangeBytes) +
        (bytes_weights - bytes_weights / static_cast<double>(field_parts)) /
            constants::kExchangeBytes;
    int64_t phases = exchange > 0 ? 2 : 1;
    double compute = static_cast<double>(groups) *
                     window_cycles(types, device_.version, batch * rows,
                                   columns, in, out, kernel_);
    add_partials(results, plan.in, exchange, compute, phases);
    const auto turns = static_cast<double>(plan.turns);
    if (plan.turns > 1) compute += slice(plan.turns);
    plan.exchange = turns * exchange;
    plan.compute = turns * compute;
    plan.sync = turns * static_cast<double>(phases) * constants::kSync.value;
    plan.cycles = plan.exchange + plan.compute + plan.sync;
    plan.temporary_bytes = bytes_in + bytes_weights +
                           static_cast<double>(results * types.partial_size() *
                                               (plan.in > 1 ? 2 : 1));
  }

  void add_partials(int64_t results, int64_t parts, double& exchange,
                    double& compute, int64_t& phases) const {
    const ProductTypes& types = problem_.types;
    const bool wide = !types.half_partials;
    for (const int64_t depth : reduction_depths(parts)) {
      const auto k = static_cast<double>(depth);
      exchange += static_cast<double>(results * types.partial_size()) *
                  (k - 1) / k / constants::kExchangeBytes;
      results = ceil_div(results, depth);
      compute += reduce_partials(results, depth, wide, problem_.float_result);
      phases += 2;
    }
    if (parts == 1 && types.half && wide && !problem_.float_result) {
      const int64_t each = ceil_div(ceil_div(results, constants::kWorkers), 2);
      compute += static_cast<double>(constants::kWorkers * (26 + each));
      phases += 1;
    }
  }

  [[nodiscard]] double slice(int64_t turns) const {
    const int64_t weights = ceil_div(
        kernel_ * problem_.in * problem_.out * problem_.groups, tiles_);
    const int64_t vectors =
        ceil_div(ceil_div(weights / turns, constants::kWorkers),
                 8 / problem_.types.size());
    return static_cast<double>(constants::kWorkers * (63 + 2 * vectors));
  }

  const Device& device_;
  int64_t tiles_;
  ConvolutionProblem problem_;
  int64_t kernel_ = 1;
  int64_t out_units_ = 1;
  Frontier<ConvolutionPlan> plans_;
};

using ConvolutionKey =
    std::tuple<int32_t, int64_t, int64_t, bool, double, ConvolutionProblem>;

}  // namespace

ConvolutionPlan plan_convolution(const Device& device, int64_t tiles,
                                 double proportion,
                                 const ConvolutionProblem& problem) {
  const bool is_empty = problem.batch * problem.rows * problem.columns == 0 ||
                        problem.in * problem.out * problem.groups == 0;
  if (is_empty) return {};
  static std::mutex mutex;
  static std::map<ConvolutionKey, ConvolutionPlan> known;
  const ConvolutionKey key{device.version,    tiles,      device.tile_bytes,
                           device.shares_bus, proportion, problem};
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(key); found != known.end()) {
      return found->second;
    }
  }
  const ConvolutionPlan plan =
      ConvolutionSearch(device, tiles, problem).run(proportion);
  const std::lock_guard lock(mutex);
  return known.emplace(key, plan).first->second;
}

std::string to_string(const ConvolutionPlan& plan) {
  std::string text = join(plan.batch, " x ", plan.rows, " x ", plan.columns,
                          " x ", plan.in, " x ", plan.out);
  if (plan.groups > 1) text += join(" x ", plan.groups);
  text += " tiles";
  if (plan.turns > 1) text += join(", ", plan.turns, " turns");
  return text;
}

}  // namespace popsim::machine
