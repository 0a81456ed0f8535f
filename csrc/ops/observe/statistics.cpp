// Statistics of a tensor while a program runs: counts, moments, a histogram,
// the largest values, samples and a fingerprint, in one pass over its memory;
// the same for each channel, in a second one.
#include <array>
#include <cmath>
#include <optional>

#include "ops/observe/blocks.h"
#include "ops/observe/channels.h"
#include "ops/observe/fingerprint.h"
#include "ops/observe/histogram.h"
#include "ops/observe/moments.h"
#include "ops/observe/requests.h"
#include "ops/observe/scan.h"
#include "ops/observe/top.h"
#include "ops/op_def.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using observe::Block;
using observe::Requests;

// Memory is read, and each value costs several vector instructions.
constexpr int64_t kValueCost = 2;
// Bins count with 32 bits, and a task has a sixteenth of all values or more.
constexpr int64_t kMostValues = int64_t{1} << 35;
static_assert(kMostValues / threads::Tasks::kMax < (int64_t{1} << 32));

int32_t smallest_normal(DType dtype) {
  return dtype == DType::kFloat16 ? 0x38800000 : 0x00800000;
}

// What a task has found, and its memory.
struct Part {
  Part(const Requests& requests, int64_t num_values,
       const observe::BlockReader& reader)
      : memory(reader.memory()), top(requests.top) {
    finite.resize(observe::kBlock);
    if (!memory.exact.empty()) finite_exact.resize(observe::kBlock);
    if (requests.histogram()) bins.emplace(requests.mantissa_bits, num_values);
  }

  void clear() {
    others = {};
    moments = {};
    sizes = {};
    fingerprint = 0;
    top.clear();
    if (bins) bins->clear();
  }

  observe::OtherCounts others;
  observe::Moments moments;
  observe::SizeCounts sizes;
  uint64_t fingerprint = 0;

  observe::BlockMemory memory;
  std::vector<float> finite;
  std::vector<double> finite_exact;
  observe::Top top;
  std::optional<observe::Bins> bins;
};

class Statistics final : public Kernel {
 public:
  explicit Statistics(const OpView& op)
      : requests_(op),
        numel_(op.input(0).numel()),
        reader_(op, requests_.fingerprint,
                requests_.fingerprint || requests_.top > 0),
        counter_(smallest_normal(op.input(0).dtype)),
        out_(op.output_id(0)),
        tasks_(threads::elements(kValueCost * numel_), reader_.num_blocks()) {
    parts_.reserve(static_cast<size_t>(tasks_.count()));
    for (int64_t i = 0; i < tasks_.count(); ++i) {
      parts_.emplace_back(requests_, numel_ / tasks_.count(), reader_);
    }
    if (requests_.channels()) channels_.emplace(op, requests_.channel_axis);
  }

  void run(const RunContext& context) override {
    tasks_.run([&](int64_t task, threads::Range blocks) {
      Part& part = parts_[static_cast<size_t>(task)];
      part.clear();
      for (int64_t i = blocks.begin; i < blocks.end; ++i) {
        add(reader_.read(context, i, part.memory), part);
      }
      if (part.bins) part.bins->fold();
    });
    write(context, join());
    if (channels_) {
      channels_->run(context, context.data<double>(out_) + requests_.length() -
                                  requests_.channel_results());
    }
  }

 private:
  void add(const Block& block, Part& part) const;
  int32_t add_floats(const Block& block, Part& part) const;
  int32_t add_exact(const Block& block, Part& part) const;
  Part& join();
  void write(const RunContext& context, const Part& all) const;
  double* write_moments(const observe::Moments& moments, double* out) const;
  double* write_top(const observe::Top& top, double* out) const;

  Requests requests_;
  int64_t numel_;
  observe::BlockReader reader_;
  observe::SizeCounter counter_;
  graph::TensorId out_;
  threads::Tasks tasks_;
  std::vector<Part> parts_;  // by task
  std::optional<observe::Channels> channels_;
};

void Statistics::add(const Block& block, Part& part) const {
  const int32_t largest =
      block.exact != nullptr ? add_exact(block, part) : add_floats(block, part);
  if (requests_.counts) {
    counter_.count(block.floats, block.count, largest, part.sizes);
  }
  if (requests_.fingerprint) part.fingerprint += fingerprint_of(block);
  if (requests_.top > 0) part.top.add(block, largest);
  if (part.bins) part.bins->add(block.floats, block.count);
}

// Counts what is not finite, and adds the moments of the rest. Returns the
// largest magnitude. The moments know it, unless a value is not finite.
int32_t Statistics::add_floats(const Block& block, Part& part) const {
  if (requests_.moments) {
    const observe::Moments moments =
        observe::moments_of(block.floats, block.count);
    if (std::isfinite(moments.squares)) {
      part.moments.add(moments);
      return std::max(
          observe::magnitude_bits(static_cast<float>(moments.minimum)),
          observe::magnitude_bits(static_cast<float>(moments.maximum)));
    }
  }
  const int32_t largest = observe::largest_magnitude(block.floats, block.count);
  if (largest < observe::kInfinityBits) return largest;
  observe::count_others(block.floats, block.count, part.others);
  if (requests_.moments) {
    float* finite = part.finite.data();
    const int64_t count =
        observe::take_finite(block.floats, block.count, finite);
    part.moments.add(observe::moments_of(finite, count));
  }
  return largest;
}

// The same of values that float32 rounds.
int32_t Statistics::add_exact(const Block& block, Part& part) const {
  const int32_t largest = observe::largest_magnitude(block.floats, block.count);
  const double* values = block.exact;
  int64_t count = block.count;
  if (largest >= observe::kInfinityBits) {
    observe::count_others(values, count, part.others);
    count = observe::take_finite(values, count, part.finite_exact.data());
    values = part.finite_exact.data();
  }
  if (requests_.moments) part.moments.add(observe::moments_of(values, count));
  return largest;
}

// Adds all parts but their bins to the first one.
Part& Statistics::join() {
  Part& all = parts_.front();
  for (size_t i = 1; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    all.others.nans += part.others.nans;
    all.others.infs += part.others.infs;
    all.moments.add(part.moments);
    all.sizes.zeros += part.sizes.zeros;
    all.sizes.subnormals += part.sizes.subnormals;
    all.sizes.half_overflows += part.sizes.half_overflows;
    all.sizes.half_underflows += part.sizes.half_underflows;
    all.fingerprint += part.fingerprint;
    all.top.add(part.top);
  }
  return all;
}

void Statistics::write(const RunContext& context, const Part& all) const {
  auto* out = context.data<double>(out_);
  for (const int64_t number : {numel_, all.others.nans, all.others.infs}) {
    *out++ = static_cast<double>(number);
  }
  if (requests_.moments) out = write_moments(all.moments, out);
  if (requests_.counts) {
    const observe::SizeCounts& sizes = all.sizes;
    for (const int64_t number :
         {sizes.zeros, sizes.subnormals,
          sizes.half_overflows - all.others.nans - all.others.infs,
          sizes.half_underflows}) {
      *out++ = static_cast<double>(number);
    }
  }
  if (requests_.fingerprint) {
    *out++ = static_cast<double>(static_cast<uint32_t>(all.fingerprint));
    *out++ = static_cast<double>(all.fingerprint >> 32);
  }
  out = write_top(all.top, out);
  for (int64_t i = 0; i < requests_.samples; ++i) {
    *out++ = reader_.value(context, i * numel_ / requests_.samples);
  }
  if (!requests_.histogram()) return;
  const int64_t num_bins = requests_.num_bins();
  std::fill_n(out, num_bins, 0.0);
  for (const Part& part : parts_) part.bins->add_to(out, out + num_bins / 2);
}

double* Statistics::write_moments(const observe::Moments& moments,
                                  double* out) const {
  const auto count = static_cast<double>(moments.count);
  const double mean = moments.mean();
  std::array<double, 6> results{};
  if (moments.count > 0) {
    results = {mean,
               std::sqrt(moments.squares / count),
               moments.minimum,
               moments.maximum,
               std::sqrt(moments.squares + count * mean * mean),
               moments.magnitudes / count};
  }
  return std::ranges::copy(results, out).out;
}

double* Statistics::write_top(const observe::Top& top, double* out) const {
  const auto most = static_cast<size_t>(requests_.top);
  for (size_t i = 0; i < most; ++i) {
    const bool is_there = i < top.size();
    out[i] = is_there ? top[i].value : 0.0;
    out[most + i] = is_there ? static_cast<double>(top[i].position) : -1.0;
  }
  return out + 2 * most;
}

std::vector<TensorType> statistics_type(const OpCall& op) {
  op.require(op.input(0).numel() <= kMostValues, "the input has at most ",
             kMostValues, " values");
  return {{DType::kFloat64, {Requests(op).length()}}};
}

std::vector<graph::Work> statistics_work(const OpView& op) {
  const Requests requests(op);
  const int64_t numel = op.input(0).numel();
  const int64_t of_channels = requests.channel_results();
  std::vector<graph::Work> work{
      graph::Reduce{numel, requests.length() - of_channels}};
  if (requests.channels()) work.emplace_back(graph::Reduce{numel, of_channels});
  return work;
}

}  // namespace

extern const OpDef kStatistics{
    .name = "statistics",
    .schema =
        "statistics(Tensor x, *, bool moments, bool counts, "
        "int{-1..3} histogram, int{0..64} top, int{0..4096} samples, "
        "bool fingerprint, int{-1..} channels) -> Tensor",
    .family = "observe",
    .shape = statistics_type,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<Statistics>(op);
    },
    .work = statistics_work,
};

}  // namespace popsim::ops
