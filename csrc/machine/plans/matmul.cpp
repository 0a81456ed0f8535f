#include "machine/plans/matmul.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "machine/constants.h"
#include "machine/formulas/partials.h"
#include "machine/plans/parts.h"

namespace popsim::machine {
namespace {

constexpr int64_t kMaxOutTurns = 16;
constexpr int64_t kMaxInTurns = 8;

struct Sizes {
  int64_t field;
  int64_t in;
  int64_t out;
  int64_t groups;
};

class MatmulSearch {
 public:
  MatmulSearch(const Device& device, int64_t tiles, double proportion,
               const MatmulProblem& problem, double sync)
      : device_(device),
        tiles_(tiles),
        problem_(problem),
        proportion_(proportion),
        sync_(sync) {}

  MatmulPlan run() {
    look(false);
    look(true);
    return plans_.best(proportion_ * static_cast<double>(device_.tile_bytes));
  }

 private:
  void look(bool swapped) {
    const ProductTypes& types = problem_.types;
    const Sizes sizes{swapped ? problem_.m : problem_.n, problem_.k,
                      swapped ? problem_.n : problem_.m, problem_.groups};
    const int64_t in_units = ceil_div(sizes.in, types.channels());
    const int64_t out_units = ceil_div(sizes.out, types.units(device_.version));
    for (const int64_t in : useful_parts(in_units, tiles_)) {
      for (const int64_t out : useful_parts(out_units, tiles_ / in)) {
        for (const int64_t groups :
             useful_parts(sizes.groups, tiles_ / (in * out))) {
          for (const int64_t field :
               field_parts(sizes.field, tiles_ / (in * out * groups))) {
            look(sizes, {field, in, out, groups, 1, 1, swapped});
          }
        }
      }
    }
  }

  // In all turns.
  void look(const Sizes& sizes, MatmulPlan parts) {
    const int64_t in_units = ceil_div(sizes.in, problem_.types.channels());
    const int64_t out_units =
        ceil_div(sizes.out, problem_.types.units(device_.version));
    for (parts.out_turns = 1; parts.out_turns <= kMaxOutTurns;
         parts.out_turns *= 2) {
      if (!useful_turns(ceil_div(out_units, parts.out), parts.out_turns)) break;
      for (parts.in_turns = 1; parts.in_turns <= kMaxInTurns;
           parts.in_turns *= 2) {
        if (!useful_turns(ceil_div(in_units, parts.in), parts.in_turns)) break;
        MatmulPlan plan = parts;
        price(sizes, plan);
        plans_.keep(plan);
      }
    }
  }

  static bool useful_turns(int64_t units, int64_t turns) {
    return turns == 1 || units >= turns;
  }

  void price(const Sizes& sizes, MatmulPlan& plan) const {
    const ProductTypes& types = problem_.types;
    const int64_t unit = types.units(device_.version);
    const int64_t step = types.channels();
    const int64_t field = ceil_div(sizes.field, plan.field);
    const int64_t in = std::min(
        ceil_div(ceil_div(ceil_div(sizes.in, step), plan.in), plan.in_turns) *
            step,
        sizes.in);
    const int64_t out =
        std::max(ceil_div(ceil_div(ceil_div(sizes.out, unit), plan.out),
                          plan.out_turns) *
                     unit,
                 unit);
    const int64_t groups = ceil_div(sizes.groups, plan.groups);
    const auto bytes_in =
        static_cast<double>(field * in * groups * types.size());
    const auto bytes_weights =
        static_cast<double>(in * out * groups * types.size());
    const int64_t results = field * out * groups;
    const bool shared = device_.shares_bus && plan.out % 2 == 0;
    plan.exchange_in =
        (bytes_in - bytes_in / static_cast<double>(plan.out)) /
        (shared ? 2 * constants::kExchangeBytes : constants::kExchangeBytes);
    plan.exchange_weights =
        (bytes_weights - bytes_weights / static_cast<double>(plan.field)) /
        constants::kExchangeBytes;
    plan.compute =
        product_cycles(types, device_.version, field, in, out, groups);
    plan.phases = 1 + (plan.exchange_in + plan.exchange_weights > 0 ? 1 : 0);
    price_partials(results, plan);
    price_slices(sizes, results, plan);
    plan.rearrange = plan.swapped ? rearrange_all() : 0;
    const auto turns = static_cast<double>(plan.turns());
    const double sync = static_cast<double>(plan.phases) * sync_;
    plan.sync = turns * sync + (plan.swapped ? 2 * sync_ : 0);
    plan.cycles =
        turns * (plan.exchange_in + plan.exchange_weights + plan.compute +
                 plan.exchange_partials + plan.reduce + plan.slice + sync) +
        plan.rearrange;
    plan.temporary_bytes = bytes_in + bytes_weights +
                           static_cast<double>(results * types.partial_size() *
                                               (plan.in > 1 ? 2 : 1));
  }

  void price_partials(int64_t results, MatmulPlan& plan) const {
    const ProductTypes& types = problem_.types;
    const bool wide = !types.half_partials;
    if (plan.in > 1) {
      const auto depths = reduction_depths(plan.in);
      for (const int64_t depth : depths) {
        const auto k = static_cast<double>(depth);
        plan.exchange_partials += static_cast<double>(results) *
                                  static_cast<double>(types.partial_size()) *
                                  (k - 1) / k / constants::kExchangeBytes;
        plan.reduce += reduce_partials(ceil_div(results, depth), depth, wide,
                                       problem_.float_result);
        results = ceil_div(results, depth);
      }
      plan.phases += 2 * std::ssize(depths);
    } else if (types.half && wide && !problem_.float_result) {
      const int64_t each = ceil_div(ceil_div(results, constants::kWorkers), 2);
      plan.reduce = static_cast<double>(constants::kWorkers * (26 + each));
      plan.phases += 1;
    }
  }

  void price_slices(const Sizes& sizes, int64_t results,
                    MatmulPlan& plan) const {
    if (plan.turns() == 1) return;
    constexpr int64_t kW = constants::kWorkers;
    const ProductTypes& types = problem_.types;
    const int64_t weights =
        ceil_div(sizes.in * sizes.out * sizes.groups, tiles_);
    const int64_t vectors =
        ceil_div(ceil_div(weights / plan.turns(), kW), 8 / types.size());
    plan.slice = static_cast<double>(kW * (63 + 2 * vectors));
    if (plan.in_turns == 1) return;
    const int64_t sums =
        ceil_div(ceil_div(results, kW), 8 / types.partial_size());
    plan.slice += static_cast<double>(11 + kW * (58 + 3 * sums));
  }

  [[nodiscard]] double rearrange_all() const {
    const MatmulProblem& p = problem_;
    const auto bytes = static_cast<double>((p.m * p.k + p.k * p.n + p.m * p.n) *
                                           p.groups * p.types.size()) /
                       static_cast<double>(tiles_);
    const auto word = static_cast<double>(std::min<int64_t>(8, p.types.size()));
    return bytes * 5 / (4 * word) + bytes / constants::kExchangeBytes +
           2 * sync_;
  }

  const Device& device_;
  int64_t tiles_;
  const MatmulProblem& problem_;
  double proportion_;
  double sync_;
  Frontier<MatmulPlan> plans_;
};

using MatmulKey =
    std::tuple<int32_t, int64_t, int64_t, bool, double, MatmulProblem, double>;

}  // namespace

MatmulPlan plan_matmul(const Device& device, int64_t tiles, double proportion,
                       const MatmulProblem& problem, double sync) {
  if (problem.m * problem.n * problem.groups == 0 || problem.k == 0) return {};
  static std::mutex mutex;
  static std::map<MatmulKey, MatmulPlan> known;
  const MatmulKey key{
      device.version, tiles, device.tile_bytes, device.shares_bus, proportion,
      problem,        sync};
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(key); found != known.end()) {
      return found->second;
    }
  }
  const MatmulPlan plan =
      MatmulSearch(device, tiles, proportion, problem, sync).run();
  const std::lock_guard lock(mutex);
  return known.emplace(key, plan).first->second;
}

std::string to_string(const MatmulPlan& plan) {
  std::string text = join(plan.field, " x ", plan.in, " x ", plan.out);
  if (plan.groups > 1) text += join(" x ", plan.groups);
  text += " tiles";
  if (plan.turns() > 1) {
    text += join(", ", plan.out_turns, " x ", plan.in_turns, " turns");
  }
  return text;
}

}  // namespace popsim::machine
