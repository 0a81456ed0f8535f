// The op for all other operators: any ATen operator, called through the
// dispatcher.
//
// The arguments are boxed once, when the program is compiled; run() only
// inserts the tensors. If the operator has an out= form, it writes directly
// into the arena; otherwise its results are copied there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "ops/aten/call.h"
#include "ops/aten/positions.h"
#include "ops/aten/quotients.h"
#include "ops/math/seed.h"
#include "ops/operands/all_bits.h"
#include "ops/work.h"
#include "threads/tasks.h"

namespace popsim::ops {
namespace {

using graph::TensorId;

// Operators that move or compare numbers, or whose threads compute whole
// results (a row of sums, a channel of an image), each in the order of one
// thread.
constexpr auto kSameOnThreads = std::to_array<std::string_view>({
    "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_cdist_backward",
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::_pdist_forward",
    "aten::adaptive_max_pool2d",
    "aten::adaptive_max_pool2d_backward",
    "aten::adaptive_max_pool3d",
    "aten::adaptive_max_pool3d_backward",
    "aten::avg_pool3d",
    "aten::avg_pool3d_backward",
    "aten::col2im",
    "aten::constant_pad_nd",
    "aten::cummax",
    "aten::cummin",
    "aten::cumprod",
    "aten::diagonal_copy",
    "aten::digamma",
    "aten::flip",
    "aten::fractional_max_pool2d",
    "aten::fractional_max_pool2d_backward",
    "aten::fractional_max_pool3d",
    "aten::fractional_max_pool3d_backward",
    "aten::gather",
    "aten::grid_sampler_2d",
    "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d",
    "aten::grid_sampler_3d_backward",
    "aten::im2col",
    "aten::index",
    "aten::index_select",
    "aten::kthvalue",
    "aten::logcumsumexp",
    "aten::max_pool3d_with_indices",
    "aten::max_pool3d_with_indices_backward",
    "aten::median",
    "aten::mode",
    "aten::nanmedian",
    "aten::polygamma",
    "aten::reflection_pad1d",
    "aten::reflection_pad1d_backward",
    "aten::reflection_pad2d",
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad1d",
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d",
    "aten::replication_pad3d_backward",
    "aten::roll",
    "aten::scatter",
    "aten::scatter_add",
    "aten::scatter_reduce",
    "aten::sort",
    "aten::special_zeta",
    "aten::take",
    "aten::topk",
    "aten::tril",
    "aten::triu",
    "aten::upsample_bicubic2d",
    "aten::upsample_bicubic2d_backward",
    "aten::upsample_bilinear2d_backward",
    "aten::upsample_linear1d",
    "aten::upsample_linear1d_backward",
    "aten::upsample_nearest1d",
    "aten::upsample_nearest1d_backward",
    "aten::upsample_nearest2d",
    "aten::upsample_nearest2d_backward",
    "aten::upsample_nearest3d",
    "aten::upsample_nearest3d_backward",
    "aten::upsample_trilinear3d",
    "aten::upsample_trilinear3d_backward",
    "aten::where",
});
static_assert(std::ranges::is_sorted(kSameOnThreads));

// Whether the results are the same for any number of threads. PyTorch adds up
// partial results of the threads, and uses different code for the numbers at
// the end of a thread's part; for a tenth of the elementwise operators this
// code differs in the last bit. Integers are exact.
bool may_share_work(const OpView& op) {
  if (std::ranges::binary_search(kSameOnThreads,
                                 op.attribute<std::string>("operator"))) {
    return true;
  }
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    if (op.has_output(i) && is_inexact(op.output(i).dtype)) return false;
  }
  return true;
}

// PyTorch runs smaller operators on one thread.
bool is_large(const OpView& op) {
  int64_t most = 0;
  for (size_t i = 0; i < op.num_inputs(); ++i) {
    if (op.has_input(i)) most = std::max(most, op.input(i).numel());
  }
  for (size_t i = 0; i < op.num_outputs(); ++i) {
    if (op.has_output(i)) most = std::max(most, op.output(i).numel());
  }
  return most >= at::internal::GRAIN_SIZE;
}

class AtenKernel final : public Kernel {
 public:
  explicit AtenKernel(const OpView& op)
      : call_(op, AtenCall::Form::kOut),
        inputs_(op.op().inputs),
        outputs_(op.op().outputs),
        writes_outputs_(op.has_attribute("out")),
        generator_(call_.generator()),
        shares_work_(may_share_work(op) && is_large(op)),
        operator_(op.attribute<std::string>("operator")),
        follows_(follows_positions(operator_)),
        divides_(may_overflow_quotients(operator_)),
        stream_(generator_ ? op.attribute<int64_t>("stream") : 0) {
    op.require(
        !writes_outputs_ || call_.out_positions().size() == outputs_.size(),
        "the op has ", call_.out_positions().size(), " outputs");
    for (size_t i = 0; writes_outputs_ && i < outputs_.size(); ++i) {
      op.require(op.has_output(i), "output ", i, " is present");
    }
    stack_.reserve(call_.handle().schema().arguments().size() +
                   outputs_.size());
  }

  std::vector<TensorId> at_tensors() const override {
    std::vector<TensorId> ids;
    for (const auto* tensors : {&inputs_, &outputs_}) {
      std::ranges::copy_if(*tensors, std::back_inserter(ids),
                           [](TensorId id) { return id != graph::kNoTensor; });
    }
    return ids;
  }

  void run(const RunContext& context) override {
    fill(context);
    if (writes_outputs_) {
      for (size_t i = 0; i < outputs_.size(); ++i) {
        stack_[call_.out_positions()[i]] = context.tensor(outputs_[i]);
      }
    }
    if (generator_) {
      generator_->set_current_seed(
          mix_seed(context.seed, static_cast<uint64_t>(stream_),
                   static_cast<uint64_t>(context.cursor.step)));
    }
    if (follows_) {
      threads::run_alone([&] { check_positions(operator_, stack_); });
    }
    if (divides_) {
      threads::run_alone([&] { check_quotients(operator_, stack_); });
    }
    try {
      const AllBits all_bits;
      run_threaded([&] { call_.handle().callBoxed(stack_); });
    } catch (const c10::Error& error) {
      fill(context);  // the call has taken its arguments
      const std::string which = wrong_position(operator_, stack_);
      if (which.empty()) throw;
      throw UserError(error.what_without_backtrace() + which);
    }
    if (!writes_outputs_) run_threaded([&] { store_results(context); });
    stack_.clear();
  }

 private:
  template <typename Body>
  void run_threaded(const Body& body) const {
    if (shares_work_) {
      threads::run_shared(body);
    } else {
      threads::run_alone(body);
    }
  }

  void fill(const RunContext& context) {
    call_.fill(stack_,
               [&](size_t input) { return context.tensor(inputs_[input]); });
  }

  void store_results(const RunContext& context) {
    size_t index = 0;
    for_each_result(stack_, [&](const at::Tensor& result) {
      const TensorId id = outputs_.at(index++);
      if (id == graph::kNoTensor) return;
      const at::Tensor& output = context.tensor(id);
      check_internal(output.sizes() == result.sizes(), "the operator gave ",
                     result.sizes(), " instead of ", output.sizes());
      output.copy_(result);
    });
  }

  AtenCall call_;
  std::vector<TensorId> inputs_;
  std::vector<TensorId> outputs_;
  bool writes_outputs_;
  std::optional<at::Generator> generator_;
  bool shares_work_;
  std::string operator_;
  bool follows_;  // whether it uses positions without a check
  bool divides_;  // whether it may divide the least integer by -1
  // The stream of random numbers; each random op of the model has its own.
  int64_t stream_;
  std::vector<c10::IValue> stack_;
};

}  // namespace

extern const OpDef kAten{
    .name = "aten",
    .schema =
        "aten(Tensor?[] inputs, *, str operator, str overload, "
        "arguments arguments, str? out, int? stream) -> Tensor?[]",
    .family = "aten",
    .shape = infer_aten_types,
    .prepare = [](const OpView& op) -> std::unique_ptr<Kernel> {
      return std::make_unique<AtenKernel>(op);
    },
    .work = no_arithmetic,
    .outputs = OutputLayout::kAny,
    .layer = true,
    .exact = true,
};

}  // namespace popsim::ops
